"""Predicted against measured: the step of many layouts of two models on this machine's processor.

    python bench/plan_local.py [--processes 2,4] [--turns 7] [--model NAME] [--cluster FILE] [--quick] [--json]

For each number of processes, in one run of them: the machine's figures are measured (as `allranks doctor --calibrate`
does; or read from --cluster), then every layout makes a step in each turn, forth in one turn and back in the next. The
figure of a layout is the median over turns of its slowest process; beside it stands the processor's time of the busiest
one, which other programs on the machine hardly lengthen. A layout that is refused is named with the reason. The planner
predicts each step from the model's trace and the machine's figures; it has seen none of the steps. At last, by the
number of processes and by the model, the layout that the planner would choose beside the one measured as the best.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from local_steps import DEPTH, Case, config_of, run, task_of
from rich.console import Console
from rich.table import Table

import allranks
from allranks.cli.calibration import choose_start, finish_cluster
from allranks.cluster import Cluster
from allranks.errors import AllranksError, LayoutError
from allranks.plan import Choice, StepTime
from allranks.planning.cluster_file import read_cluster, write_cluster
from allranks.planning.estimate import estimate
from allranks.process_environment import num_cores
from allranks.stepping.profile import trace_task
from allranks.training.prepare import resolve_layout

TARGET, CHOICE_TARGET = 0.15, 0.05
GLOBAL_BATCH = {"transformer": 4, "perceptron": 128}
TRANSFORMER = (
    ("ddp", 2), ("ddp", 1), ("dp_shard=*,sharding=optimizer", 2), ("fsdp", 2), ("fsdp", 1),
    ("fsdp,sharding=grad_op", 2), ("fsdp,recompute=full", 2), ("ddp,recompute=full", 2), ("tp=2,dp_shard=*", 4),
    ("pp=2,dp_shard=*,schedule=gpipe", 1), ("pp=2,dp_shard=*", 2), ("pp=2,dp_shard=*", 1), ("cp=2,dp_shard=*", 4),
)  # fmt: skip
PERCEPTRON = (
    ("ddp", 64), ("ddp", 32), ("dp_shard=*,sharding=optimizer", 64), ("fsdp", 64), ("fsdp,sharding=grad_op", 64),
    ("fsdp,recompute=full", 64), ("ddp,recompute=full", 64), ("tp=2,dp_shard=*", 128),
    ("pp=2,dp_shard=*,schedule=gpipe", 32), ("pp=2,dp_shard=*", 32),
)  # fmt: skip
NUM_PARTS = {"transformer": 6, "perceptron": DEPTH}
QUICK = ("ddp", "fsdp", "pp=2,dp_shard=*")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        micro_batch: samples of a forward.
        error: predicted by measured, less one.
        shared_busy_ms: busy_ms where every process has a core; the longer the more of them share one.
        fastest_ms: of all turns; busy_ms: the median of the processor's time, of the process that had the most.
    """

    processes: int
    model: str
    layout: str
    micro_batch: int
    predicted_ms: float
    measured_ms: float
    fastest_ms: float
    busy_ms: float
    shared_busy_ms: float
    error: float
    parts_ms: dict[str, float]


def plan_cases(nproc: int, quick: bool, only: str | None = None) -> tuple[list[Case], list[dict[str, str]]]:
    """What is measured: every layout that `nproc` processes can have, micro-batches shrunk with the ranks' shares; and
    those that are refused, with the reason."""
    found, refused = [], []
    for model, layouts in (("transformer", TRANSFORMER), ("perceptron", PERCEPTRON)):
        for text, micro_batch in layouts:
            if (quick and text not in QUICK) or only not in (None, model):
                continue
            whole = GLOBAL_BATCH[model]
            try:
                layout = Case(model, text, whole, 1).resolve(nproc)
                share = max(1, micro_batch * 2 // nproc if layout.pp == layout.tp == layout.cp == 1 else micro_batch)
                case = Case(model, str(layout), whole, min(share, whole // layout.dp))
                refuse(case, nproc)
            except AllranksError as error:
                refused.append({"model": model, "layout": text, "because": str(error)})
                continue
            found.append(case)
    return list(dict.fromkeys(found)), refused


def refuse(case: Case, nproc: int) -> None:
    """Raises what a run refuses before it starts, of what its config and its model's parts say."""
    layout = resolve_layout(config_of(case, 1), nproc)
    stages = layout.num_stages
    if stages > NUM_PARTS[case.model]:
        raise LayoutError(f"pp={layout.pp} needs {stages} parts, and the model has {NUM_PARTS[case.model]}")


def to_rows(cases: Sequence[Case], nproc: int, cluster: Cluster, measured: Sequence[Sequence[Sequence[float]]],
            busy: Sequence[Sequence[Sequence[float]]]) -> list[Row]:  # fmt: skip
    """Predict each case and set its measured seconds beside it.

    Args:
        measured, busy: of each process, of each case, of each turn.
    """
    if not cases:
        return []
    profiles = {model: trace_task(task_of(model), "float32") for model in {case.model for case in cases}}
    rows = []
    for index, case in enumerate(cases):
        choice = Choice(case.resolve(nproc), case.global_batch, case.micro_batch, "float32")
        time = estimate(profiles[case.model], cluster, choice).time
        turns = [max(turn) for turn in zip(*(process[index] for process in measured), strict=True)]
        median = statistics.median(turns)
        worked = max(statistics.median(process[index]) for process in busy) * 1e3
        rows.append(
            Row(
                nproc,
                case.model,
                case.layout,
                case.micro_batch,
                predicted_ms=time.total * 1e3,
                measured_ms=median * 1e3,
                fastest_ms=min(turns) * 1e3,
                busy_ms=worked,
                shared_busy_ms=worked * max(1.0, nproc / num_cores()),
                error=time.total / median - 1,
                parts_ms=_parts(time),
            )
        )
    return rows


def _parts(time: StepTime) -> dict[str, float]:
    return {name: seconds * 1e3 for name, seconds in asdict(time).items() if seconds}


def choices(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Of each number of processes and model: the layout of the shortest predicted step, the one of the shortest
    measured, and how much slower the first is than the second."""
    found: list[dict[str, object]] = []
    for processes, model in dict.fromkeys((row.processes, row.model) for row in rows):
        own = [row for row in rows if (row.processes, row.model) == (processes, model)]
        chosen = min(own, key=lambda row: row.predicted_ms)
        best = min(own, key=lambda row: row.measured_ms)
        least = min(own, key=lambda row: row.busy_ms)
        found.append(
            {
                "processes": processes,
                "model": model,
                "chosen": f"{chosen.layout} of {chosen.micro_batch}",
                "best": f"{best.layout} of {best.micro_batch}",
                "slower": chosen.measured_ms / best.measured_ms - 1,
                "slower_by_fastest": chosen.fastest_ms / min(row.fastest_ms for row in own) - 1,
                "busier": chosen.busy_ms / least.busy_ms - 1,
            }
        )
    return found


def measure_all(
    cases: list[Case], nproc: int, arguments: argparse.Namespace
) -> tuple[Cluster, list[Row], list[dict[str, str]]]:
    """The Cluster and the rows of `nproc` processes, in one launch; and what was refused there."""
    given = None if arguments.cluster is None else read_cluster(arguments.cluster)
    quick = arguments.quick or arguments.calibration == "quick"
    found = allranks.launch(run, cases, arguments.turns, quick, given is None, nproc=nproc)
    refused = found[0][3]
    kept = [index for index in range(len(cases)) if index not in refused]
    measured, busy = ([[one[which][index] for index in kept] for one in found] for which in (1, 2))
    cluster = given
    if cluster is None:
        with tempfile.TemporaryDirectory() as folder:
            begun = choose_start("cpu", nproc, Path(folder) / "local.toml")
            made = finish_cluster(begun, [one[0] for one in found], quick=quick)
            write_cluster(made, begun.path)
            cluster = read_cluster(begun.path)
            if arguments.keep is not None:
                write_cluster(made, arguments.keep.with_stem(f"{arguments.keep.stem}-x{nproc}"))
    told = [{"model": cases[i].model, "layout": cases[i].layout, "because": why} for i, why in refused.items()]
    return cluster, to_rows([cases[index] for index in kept], nproc, cluster, measured, busy), told


def show(document: dict[str, object], rows: Sequence[Row]) -> None:
    """The table, and what follows from it."""
    table = Table(box=None)
    for name in ("", "model", "layout", "samples", "predicted ms", "measured ms", "fastest", "busy", "error"):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for row in rows:
        times = (f"{value:.1f}" for value in (row.predicted_ms, row.measured_ms, row.fastest_ms, row.busy_ms))
        table.add_row(str(row.processes), row.model, row.layout, str(row.micro_batch), *times, f"{row.error:+.1%}")
    console = Console(width=110)
    console.print(table)
    for refused in document["refused"]:  # type: ignore[attr-defined]
        console.print(f"refused: {refused['processes']} {refused['model']} {refused['layout']}: {refused['because']}")
    errors = f"mean error {document['mean_error']:.1%}, target {TARGET:.0%}"
    by_busy = f"of the processor's time {document['mean_busy_error']:.1%}"
    console.print(f"{errors}; {by_busy}; load {document['load']}")
    for found in document["choices"]:  # type: ignore[attr-defined]
        names = f"{found['processes']} {found['model']}: chosen {found['chosen']}, best {found['best']}"
        others = f"by the fastest turns {found['slower_by_fastest']:+.1%}, processor {found['busier']:+.1%}"
        console.print(f"{names}: {found['slower']:+.1%} (at most {CHOICE_TARGET:.0%}); {others}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2", help="numbers of processes, as 2,4; default 2")
    parser.add_argument("--turns", type=int, default=None, help="of each layout; default 7, 3 with --quick")
    parser.add_argument("--cluster", type=Path, help="a calibrated cluster file; default: measured here and now")
    parser.add_argument("--keep", type=Path, help="where the measured cluster file is kept")
    parser.add_argument("--model", choices=sorted(GLOBAL_BATCH), help="only this one; default: both")
    parser.add_argument("--calibration", choices=("full", "quick"), default="full", help="as doctor's --quick")
    parser.add_argument("--quick", action="store_true", help="few layouts, a quick calibration; within a minute")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.turns = arguments.turns or (3 if arguments.quick else 7)
    before = os.getloadavg()[0]
    rows: list[Row] = []
    refused: list[dict[str, object]] = []
    sources = {}
    for nproc in (int(word) for word in arguments.processes.split(",")):
        cases, left_out = plan_cases(nproc, arguments.quick, arguments.model)
        cluster, found, refused_there = measure_all(cases, nproc, arguments)
        rows += found
        refused += [{"processes": nproc, **one} for one in (*left_out, *refused_there)]
        sources[nproc] = cluster.device.source
    document: dict[str, object] = {
        "processes": arguments.processes,
        "turns": arguments.turns,
        "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "calibration": sources,
        "mean_error": statistics.mean(abs(row.error) for row in rows),
        "mean_busy_error": statistics.mean(abs(row.predicted_ms / row.shared_busy_ms - 1) for row in rows),
        "refused": refused,
        "choices": choices(rows),
        "rows": [asdict(row) for row in rows],
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
