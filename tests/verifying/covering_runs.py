"""What `clean_runs` leaves out: the examples, and every mode of a layout and every precision, by a fixed covering rule.

Not a product: each layout is run by the programs that are named beside it, each of those runs once, with the seed that
its place in the table gives. A test sees that every mode and every example is in it.
"""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from allranks.config_sections import LayoutConfig, TrainConfig
from tests.verifying.clean_runs import CORPUS, SEEDS, STEPS, variant

EXAMPLES = {
    f"example_{path.parent.name}": path
    for path in sorted((CORPUS.parent / "examples").rglob("*.py"))
    if "(allranks.Task)" in path.read_text()
}
"""The Tasks of examples/; its loop is verified by tests/examples/test_verified.py."""
SETTINGS = {"example_fine_tuning": "task.base=digits", "example_text": "data.text=*.txt"}
"""What they need in the folder that `prepare` makes."""
DEEP, TEXT = "task_deep", "example_text"
COVERING: Mapping[str, tuple[str, ...]] = {
    "--layout fsdp,sharding=none --nproc 2": ("task_text", "example_vision"),
    "--layout dp_shard=2,sharding=grad_op": ("example_contrastive",),
    "--layout dp_shard=2,sharding=optimizer": ("example_fine_tuning",),
    "--layout dp_replicate=2,dp_shard=2": ("example_gan", "example_recommender"),
    "--layout pp=2": ("example_lightning",),
    "--layout pp=2,schedule=gpipe": ("task_digits", "example_data_parallel"),
    "--layout pp=2,schedule=interleaved": (DEEP,),
    "--layout pp=2,schedule=looped_bfs": (DEEP,),
    "--layout pp=2,schedule=interleaved_zb": (DEEP,),
    "--layout pp=2,schedule=zbv": (DEEP,),
    "--layout pp=2,schedule=dualpipev": (DEEP,),
    "--layout fsdp,recompute=full --nproc 2": ("example_hf_trainer",),
    "--layout fsdp,recompute=selective --nproc 2": (DEEP, TEXT),
    "--layout ddp,recompute=budget,compile=block --nproc 2": (DEEP,),
    "--layout fsdp,compile=block --nproc 2": (TEXT,),
    "--layout dp_replicate=2,dp_shard=2,tp=2": ("example_digits",),
    "--layout dp_shard=2,tp=2,pp=2": (DEEP,),
    "--layout dp_shard=2,cp=2,tp=2 layout.context=ring": (DEEP,),
    "--layout ddp --nproc 2 train.precision=bfloat16": ("task_vision", "task_experts"),
    "--layout tp=2 train.precision=bfloat16": (DEEP,),
    "--layout pp=2 train.precision=bfloat16": ("task_digits",),
    "--layout ddp --nproc 2 train.precision=float16": ("task_text",),
    "--layout fsdp --nproc 2 train.precision=float16": ("task_digits",),
}
SEEN_ELSEWHERE = ("float8", "float64")
"""Precisions: the first needs torchao and has a law of its own (tests/distributed), the second is in every run.

Nor is there `offload`: between a CPU and its own memory there is nothing to move, and every value of it is refused.
"""


def covering_runs() -> list[tuple[str, str, int]]:
    """(program, layout, seed) of every run."""
    runs = [(name, layout) for layout, names in COVERING.items() for name in names]
    return [(name, layout, SEEDS[place % len(SEEDS)]) for place, (name, layout) in enumerate(runs)]


def write_covering(folder: Path) -> None:
    """A program a run, as a folder for `allranks bench verify`."""
    folder.mkdir()
    for place, (name, layout, seed) in enumerate(covering_runs()):
        path = EXAMPLES.get(name, CORPUS / f"{name}.py")
        words = " ".join(filter(None, (layout, SETTINGS.get(name), STEPS, f"train.seed={seed}")))
        (folder / f"{name}_{place:02d}.py").write_text(variant(as_program(path.read_text()), [words], seed))


def as_program(text: str) -> str:
    """A Task with the docstring that a program of a corpus has, where it has none."""
    docstring = ast.parse(text).body[0]
    if "\nverify: " in text:
        return text
    assert isinstance(docstring, ast.Expr) and docstring.end_lineno is not None
    rest = "\n".join(text.splitlines()[docstring.end_lineno :])
    return f'"""Clean: an example.\n\nverify: --nproc 2\n"""\n{rest}\n'


def prepare(folder: Path) -> None:
    """What the examples read: a text, and the run of digits with which fine-tuning begins."""
    (folder / "notes.txt").write_text("it was a dark and stormy night; " * 400)
    digits = str(EXAMPLES["example_digits"])
    words = ["train", digits, "--layout", "single", "train.epochs=1", "--run", "digits"]
    subprocess.run([sys.executable, "-m", "allranks", *words], cwd=folder, check=True, capture_output=True)


def modes() -> dict[str, set[str]]:
    """Every value that a mode of a layout, and a precision, may have, but for the default."""
    found: dict[str, set[str]] = {}
    for name in ("sharding", "schedule", "recompute", "compile"):
        found[name] = values(LayoutConfig, name) - {str(LayoutConfig.model_fields[name].default), "full"}
    found["recompute"].add("full")  # of sharding that is what is not said
    found["train.precision"] = values(TrainConfig, "precision") - {"float32", *SEEN_ELSEWHERE}
    return found


def values(section: type[LayoutConfig] | type[TrainConfig], name: str) -> set[str]:
    """What a key takes, of those that take one of some words."""
    annotation = section.model_fields[name].annotation
    return {
        str(word) for part in (annotation, *get_args(annotation)) for word in get_args(part) if isinstance(word, str)
    }
