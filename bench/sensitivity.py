"""How small a mistake does `allranks verify TASK` find? One gradient tensor of the ranks, too large by a factor.

A Task runs once under each layout and on one device, as verify runs it. Then one tensor of what the ranks have computed
is multiplied by 1 + x, and the records are judged as verify judges them: the smallest x that is found, for each tensor
by itself. Told are the median over tensors, and how many are found
at 1e-9 (float64) and 2% (bfloat16); --json names the others.

    python bench/sensitivity.py [--tasks digits,transformer] [--layouts ddp,fsdp,tp] [--precisions float64,bfloat16]
        [--quick] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.request import TrainRequest
from allranks.surviving.launch import launch
from allranks.verifying.findings import Finding
from allranks.verifying.judge import judge
from allranks.verifying.low_precision import judge_low_precision
from allranks.verifying.lowered import run_lowered
from allranks.verifying.plan import Plan, plan_run
from allranks.verifying.recording import OneDevice, Part
from allranks.verifying.task_ranks import Errand, TaskRecord, run_task_rank
from allranks.verifying.task_verify import evidence_of, run_task_alone

ROOT = Path(__file__).parents[1]
TASKS = {
    "digits": ROOT / "examples/digits/task.py",
    "transformer": ROOT / "corpus/task_deep.py",
    "text": ROOT / "corpus/task_text.py",
    "experts": ROOT / "corpus/task_experts.py",
}
DEFAULT_TASKS = "digits,transformer"
"""The others do not run under every layout."""
LAYOUTS = {"ddp": "ddp", "fsdp": "fsdp", "tp": "tp=2"}
PRECISIONS = ("float64", "bfloat16")
WANTED = {"float64": 1e-9, "bfloat16": 0.02}
"""An x of at most so much has to be found."""
STEPS = 2
LARGEST, SMALLEST, BISECTIONS = 0.0, -16.0, 10
"""Exponents of ten between which x is searched for."""

Records = tuple[OneDevice, Sequence[TaskRecord]]


def run(plan: Plan, precision: str) -> Records:
    """Both sides, with nothing wrong."""
    with tempfile.TemporaryDirectory() as folder:
        errand = Errand(plan.request, STEPS, f"{folder}/checkpoints")
        if precision == "float64":
            one: OneDevice = launch(run_task_alone, errand, nproc=1)[0]
            return one, launch(run_task_rank, errand, nproc=plan.nproc)
        words = (*plan.request.overrides, f"train.precision={precision}")
        found = run_lowered(replace(plan.request, overrides=words), errand, plan.nproc)
        assert found.comparable, found.note
        return found.one, found.ranks


@contextmanager
def off_by(ranks: Sequence[TaskRecord], name: str, factor: float) -> Iterator[None]:
    """One gradient of the first step is so many times what it was, on every rank that holds some of it."""
    kept = [record.run.steps[0].raw for record in ranks]
    for record, raw in zip(ranks, kept, strict=True):
        some = {name: Part(raw[name].box, raw[name].value * factor)} if name in raw else {}
        record.run.steps[0].raw = {**raw, **some}
    try:
        yield
    finally:
        for record, raw in zip(ranks, kept, strict=True):
            record.run.steps[0].raw = raw


def smallest_found(is_found: Callable[[float], bool]) -> float:
    """The smallest x at which it is found, to a few percent in the exponent; inf where not even 1 is."""
    high, low = LARGEST, SMALLEST
    if not is_found(10**high):
        return float("inf")
    for _ in range(BISECTIONS):
        middle = (high + low) / 2
        high, low = (middle, low) if is_found(10**middle) else (high, middle)
    return float(10**high)


def search(records: Records, precision: str) -> dict[str, float]:
    """The smallest x of each tensor. Raises AssertionError where the run itself is not equal."""
    one, ranks = records

    def judged() -> list[Finding]:
        evidence = evidence_of(one, ranks)
        return judge(evidence) if precision == "float64" else judge_low_precision(evidence)

    clean = judged()
    assert not clean, str(clean[0])

    def is_found(name: str, x: float) -> bool:
        with off_by(ranks, name, 1 + x):
            return any(finding.tensor == name for finding in judged())

    return {name: smallest_found(lambda x, name=name: is_found(name, x)) for name in one.run.steps[0].raw}  # type: ignore[misc]


def row(task: str, layout: str, precision: str) -> dict[str, Any]:
    """One line of the table."""
    request = TrainRequest(task_spec=str(TASKS[task]), layout=LAYOUTS[layout], nproc=2, device="cpu")
    found = search(run(plan_run(request, STEPS), precision), precision)
    seen = {name: x for name, x in found.items() if x <= WANTED[precision]}
    return {
        "task": task,
        "layout": LAYOUTS[layout],
        "precision": precision,
        "tensors": len(found),
        "median": float(f"{statistics.median(found.values()):.2g}"),
        "worst": float(f"{max(found.values()):.2g}"),
        "wanted": WANTED[precision],
        "not_found": sorted(found.keys() - seen.keys()),
    }


def show(found: dict[str, Any]) -> str:
    """A line of the table, as docs/explanation/verify.md has it."""
    seen = f"{found['tensors'] - len(found['not_found'])} of {found['tensors']}"
    numbers = f"{found['median']:.1e} | {found['wanted']:.0e} | {seen}"
    return f"| {found['task']} | `{found['layout']}` | {found['precision']} | {numbers} |"


def main() -> None:
    """Run, search and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=DEFAULT_TASKS, help="some of " + ", ".join(TASKS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="some of " + ", ".join(LAYOUTS))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--quick", action="store_true", help="digits under ddp: ends within a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tasks, layouts = (["digits"], ["ddp"]) if options.quick else (options.tasks.split(","), options.layouts.split(","))
    load, out = os.getloadavg()[0], sys.stderr if options.json else sys.stdout
    print("| Task | layout | precision | smallest x, median of the tensors | found at | in |", file=out)
    print("|---|---|---|---|---|---|", file=out, flush=True)
    rows = []
    for precision in options.precisions.split(","):
        for task in tasks:
            for layout in layouts:
                rows.append(row(task, layout, precision))
                print(show(rows[-1]), file=out, flush=True)
    if options.json:
        print(json.dumps({"load_before": load, "load_after": os.getloadavg()[0], "rows": rows}))


if __name__ == "__main__":
    main()
