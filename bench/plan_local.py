"""Predicted against measured: the step of many layouts of two models on this machine's processor.

    python bench/plan_local.py [--processes 2,4] [--turns 7] [--model NAME] [--cluster FILE] [--quick] [--json]
                               [--save FILE]
    python bench/plan_local.py --repredict FILE

For each number of processes: the machine's figures are measured, as `allranks doctor --calibrate` does (or read from
--cluster). With them the planner predicts a step of every layout from the model's trace, and its own search chooses one
among all that there are, as `allranks plan` does; it has seen none of the steps. Then every layout, the chosen one
among them, makes a step in each turn, forth in one turn and back in the next. The figure of a layout is the median over
turns of its slowest process; beside it stands the processor's time of the busiest one, which other programs on the
machine hardly lengthen. A layout that is refused is named with the reason. At last, by the number of processes and by
the model, the chosen layout beside the one measured as the best.

`--processes 2,4 --save bench/results/plan_local.json` and `make fix` write the figures of docs/explanation/measured.md.
Where the planner has changed since, and the engine has not, --repredict puts today's predictions and choices into that
file, beside the steps that were measured.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from local_cases import GLOBAL_BATCH, chosen_cases, plan_cases, with_chosen
from local_predictions import (
    GOALS,
    Row,
    judged,
    measured_row,
    predict,
    profiles_of,
    repredict,
    store_cluster,
    stored_cluster,
)
from local_steps import Case, run
from rich.console import Console
from rich.table import Table

import allranks
from allranks.benchmarking.machine import describe_machine, machine_load
from allranks.cli.calibration import choose_start, finish_cluster, measure_here
from allranks.cluster import Cluster
from allranks.durable import write_whole
from allranks.planning.cluster_file import read_cluster, write_cluster

Refused = list[dict[str, str]]


def calibrate(nproc: int, quick: bool) -> Cluster:
    """What `allranks doctor --calibrate --device cpu --nproc N` writes, read back."""
    begun = choose_start("cpu", nproc, Path("local.toml"))
    figures = allranks.launch(measure_here, "cpu", quick, nproc=nproc)
    return stored_cluster(store_cluster(finish_cluster(begun, figures, quick=quick)))


def measure(cases: Sequence[Case], nproc: int, turns: int) -> tuple[list[tuple[Case, Row]], Refused]:
    """Every case with its measured row; and what was refused in the processes."""
    found = allranks.launch(run, cases, turns, nproc=nproc)
    refused = found[0][2]
    rows = [
        (case, measured_row(case, nproc, *([one[which][index] for one in found] for which in (0, 1))))
        for index, case in enumerate(cases)
        if index not in refused
    ]
    return rows, [
        {"model": cases[i].model, "layout": cases[i].layout, "because": because} for i, because in refused.items()
    ]


def measure_all(
    nproc: int, arguments: argparse.Namespace
) -> tuple[Cluster, list[Row], dict[tuple[int, str], Case], Refused]:
    """Of `nproc` processes: the Cluster, the rows, what was chosen of each model, and what was refused."""
    listed, refused = plan_cases(nproc, arguments.quick, arguments.model)
    if arguments.cluster is None:
        cluster = calibrate(nproc, arguments.quick or arguments.calibration == "quick")
    else:
        cluster = read_cluster(arguments.cluster)
    if arguments.keep is not None:
        write_cluster(cluster, arguments.keep.with_stem(f"{arguments.keep.stem}-x{nproc}"))
    profiles = profiles_of(case.model for case in listed)
    chosen = chosen_cases(profiles, cluster)
    measured, refused_there = measure(with_chosen(listed, chosen), nproc, arguments.turns)
    rows = [row.with_prediction(predict(case, nproc, profiles[case.model], cluster)) for case, row in measured]
    return cluster, rows, {(nproc, model): case for model, case in chosen.items()}, [*refused, *refused_there]


def make_document(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and all that was found."""
    machine = describe_machine("cpu")
    rows: list[Row] = []
    chosen: dict[tuple[int, str], Case] = {}
    refused: list[dict[str, object]] = []
    clusters = {}
    for nproc in arguments.processes:
        cluster, found, taken, refused_there = measure_all(nproc, arguments)
        rows += found
        chosen |= taken
        refused += [{"processes": nproc, **one} for one in refused_there]
        clusters[str(nproc)] = store_cluster(cluster)
    return {
        "machine": {**machine, "load_after": machine_load()},
        "quick": arguments.quick or arguments.calibration == "quick",
        "turns": arguments.turns,
        "clusters": clusters,
        "refused": refused,
        **judged(rows, chosen),
    }


def words_of(case: Mapping[str, Any]) -> str:
    """A layout of a choice, with its micro-batch."""
    context = f",context={case['context']}" if "cp=" in case["layout"] else ""
    return f"{case['layout']}{context} of {case['micro_batch']}"


def show(document: Mapping[str, Any]) -> None:
    """The table, and what follows from it."""
    table = Table(box=None)
    for name in ("", "model", "layout", "samples", "predicted ms", "measured ms", "fastest", "busy", "error"):
        table.add_column(name, justify="left" if name in ("model", "layout") else "right")
    for row in document["rows"]:
        times = (row["predicted_ms"], row["measured_ms"], min(row["turns_ms"]), row["busy_ms"])
        what = (str(row["processes"]), row["model"], row["layout"], str(row["micro_batch"]))
        table.add_row(*what, *(f"{value:.1f}" for value in times), f"{row['error']:+.1%}")
    console = Console(width=110)
    console.print(table)
    for refused in document["refused"]:
        console.print(f"refused: {refused['processes']} {refused['model']} {refused['layout']}: {refused['because']}")
    for size, error in document["mean_error"].items():
        goal = f", target {GOALS['error']:.0%}" if size == "2" else ""
        console.print(f"{size}: mean error {error:.1%}{goal}; by busy {document['mean_busy_error'][size]:.1%}")
    console.print(f"load {document['machine']['load']} before, {document['machine']['load_after']} after")
    for found in document["choices"]:
        names = f"{found['processes']} {found['model']}: chosen {words_of(found['chosen'])}"
        if found["slower"] is None:
            console.print(f"{names}, which was not measured; best {words_of(found['best'])}")
            continue
        others = f"by the fastest turns {found['slower_by_fastest']:+.1%}, processor {found['busier']:+.1%}"
        target = f"{found['slower']:+.1%} (at most {GOALS['slower']:.0%})"
        console.print(f"{names}, best {words_of(found['best'])}: {target}; {others}")


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2", help="numbers of processes, as 2,4; default 2")
    parser.add_argument("--turns", type=int, default=None, help="of each layout; default 7, 3 with --quick")
    parser.add_argument("--cluster", type=Path, help="a calibrated cluster file; default: measured here and now")
    parser.add_argument("--keep", type=Path, help="where the measured cluster file is kept")
    parser.add_argument("--model", choices=sorted(GLOBAL_BATCH), help="only this one; default: both")
    parser.add_argument("--calibration", choices=("full", "quick"), default="full", help="as doctor's --quick")
    parser.add_argument("--quick", action="store_true", help="few layouts, a quick calibration; within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document, with the machine and the commit")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write that document")
    parser.add_argument("--repredict", type=Path, metavar="FILE", help="measure nothing: predict that document anew")
    arguments = parser.parse_args()
    if arguments.save is not None and arguments.model is not None:
        parser.error("--save keeps a run of both models: leave --model out")
    arguments.processes = [int(word) for word in arguments.processes.split(",")]
    if arguments.cluster is not None and len(arguments.processes) > 1:
        parser.error("--cluster is of one number of processes: give --processes one")
    arguments.turns = arguments.turns or (3 if arguments.quick else 7)
    return arguments


def main() -> int:
    """Measure, or predict anew; print it, and keep it where that is asked for."""
    arguments = read_arguments()
    kept = arguments.save
    if arguments.repredict is not None:
        kept = arguments.repredict
        document = repredict(json.loads(kept.read_text(encoding="utf-8")))
    else:
        document = make_document(arguments)
    if kept is not None:
        write_whole(kept, json.dumps(document, indent=2, allow_nan=False) + "\n")
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
