"""The clean programs of the corpus under every layout that they allow, with seeds of their own each time.

A variant of a program is its file with every seed that it sets moved by the same number, and with other lines
`verify:`; a Task is given `train.seed`, too. A folder of variants is scored by `allranks bench verify` as any other.

A Task allows what verify does not refuse (exit code 2), and by that alone a layout could vanish from the list unseen:
`has_to_run` says which may not be. A loop of its own has its layout in its code: only the number of processes varies,
among those over which its batches are cut evenly, as it promises.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allranks.verifying.corpus import Entry, read_corpus

CORPUS = Path(__file__).parents[2] / "corpus"
SEEDS = (0, 1, 2)
STRIDE = 1000  # between two seeds of a variant: no program counts so far
STEPS = "--steps 2"
REFUSED = 2

DATA_PARALLEL = (
    "--layout ddp --nproc 2",
    "--layout fsdp --nproc 2",
    "--layout dp_shard=2,sharding=grad_op",
    "--layout dp_shard=2,sharding=optimizer",
    "--layout dp_replicate=2,dp_shard=2",
)
OTHERS = (
    "--layout fsdp,recompute=full --nproc 2",
    "--layout tp=2",
    "--layout cp=2",
    "--layout pp=2",
    "--layout dp_replicate=2,ep=2",
    "--layout tp=2,dp_shard=2",
    "--layout cp=2,dp_shard=2",
    "--layout pp=2,dp_shard=2",
)
RUN_BY: Mapping[str, tuple[str, ...]] = {
    "--layout fsdp,recompute=full --nproc 2": ("task_deep", "task_experts"),
    "--layout tp=2": ("task_contrastive", "task_deep", "task_experts", "task_frozen", "task_gan", "task_stream"),
    "--layout cp=2": ("task_experts",),
    "--layout pp=2": ("task_digits", "task_experts", "task_stream"),
    "--layout tp=2,dp_shard=2": ("task_digits", "task_frozen", "task_gan", "task_stream"),
    "--layout cp=2,dp_shard=2": ("task_deep",),
    "--layout pp=2,dp_shard=2": ("task_deep", "task_digits", "task_stream"),
}
"""A floor: Tasks that have run under one of the others, besides those whose own lines name it."""
PROCESSES = (2, 4)
OTHER_PROCESSES: Mapping[str, tuple[int, ...]] = {
    "evaluated": (2, 3, 4),
    "schedule": (2, 3),  # twelve samples in micro-batches of two
    "stream": (2, 3),  # six samples
}
SETTING = frozenset(("manual_seed", "seed", "default_rng", "Random"))
"""Calls whose first argument is a seed; a keyword `seed` is one in any call."""


def is_task(entry: Entry) -> bool:
    """Whether the program is a Task, not a loop."""
    return entry.name.startswith("task_")


def runs_of(entry: Entry, seed: int) -> list[str]:
    """How a variant is verified."""
    if not is_task(entry):
        return [f"--nproc {number} {STEPS}" for number in OTHER_PROCESSES.get(entry.name, PROCESSES)]
    runs = dict.fromkeys((*DATA_PARALLEL, *OTHERS, *entry.runs))
    return [f"{run} {STEPS} train.seed={seed}" for run in runs]


def has_to_run(name: str, run: str) -> bool:
    """Whether a variant of this name may not be refused: under data parallelism, and where it is known to run."""
    entry = next(entry for entry in clean_programs() if name == f"{entry.name}_{name.rpartition('_')[2]}")
    layout = run.partition(f" {STEPS}")[0]
    known = layout in (*DATA_PARALLEL, *entry.runs) or entry.name in RUN_BY.get(layout, ())
    return not is_task(entry) or known


def clean_programs() -> list[Entry]:
    """Those of the corpus."""
    return read_corpus(CORPUS, {"clean"})


def write_variants(folder: Path, seeds: tuple[int, ...] = SEEDS) -> None:
    """Every clean program with every seed, as a folder for `allranks bench verify`."""
    folder.mkdir()
    for entry in clean_programs():
        text = entry.path.read_text()
        for seed in seeds:
            (folder / f"{entry.name}_{seed}.py").write_text(variant(text, runs_of(entry, seed), seed))


def variant(text: str, runs: list[str], seed: int) -> str:
    """A program with its seeds moved, that is to be verified by `runs`."""
    lines = moved(text, STRIDE * seed).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("verify: "))
    kept = [line for line in lines if not line.startswith("verify: ")]
    return "\n".join([*kept[:first], *(f"verify: {run}" for run in runs), *kept[first:]]) + "\n"


def moved(text: str, by: int) -> str:
    """A program in which every seed is so much larger."""
    lines = text.splitlines()
    for seed in sorted(_seeds(ast.parse(text)), key=lambda node: (-node.lineno, -node.col_offset)):
        assert seed.end_lineno == seed.lineno and seed.end_col_offset is not None
        line, start, end = lines[seed.lineno - 1], seed.col_offset, seed.end_col_offset
        lines[seed.lineno - 1] = f"{line[:start]}{_plus(seed, line[start:end], by)}{line[end:]}"
    return "\n".join(lines) + "\n"


def _seeds(tree: ast.AST) -> Iterator[ast.expr]:
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in SETTING and call.args:
            yield call.args[0]
        yield from (keyword.value for keyword in call.keywords if keyword.arg == "seed")


def _plus(seed: ast.expr, text: str, by: int) -> str:
    """A sequence of numbers is a seed, too: there the first one moves."""
    if isinstance(seed, ast.Tuple):
        return f"({by} + {text[1:]}"
    return f"{by} + {text}"


def accused(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a scored folder of variants that are neither equal nor rightly refused."""
    return [
        result
        for result in document["results"]
        if result["exit_code"] != 0 and (result["exit_code"] != REFUSED or has_to_run(result["name"], result["run"]))
    ]
