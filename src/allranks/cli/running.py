"""`allranks train` from request to exit code: alone as a worker of an outside launcher, or as the agent of its own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from allranks.cli.output import print_json
from allranks.config import read_task_spec
from allranks.launching.environment import read_environment
from allranks.request import TrainRequest
from allranks.surviving import forkserver
from allranks.verdict import Decision

if TYPE_CHECKING:
    from allranks.training.prepare import Prepared

DEMO = "allranks.training.demo:Text"
WORKER = "allranks.training.worker"


def train(request: TrainRequest) -> int:
    """Train as `request` says; the exit code of design.md section 6.

    Raises:
        AllranksError: what was asked cannot be done; nothing was started.
    """
    if read_environment(os.environ).launcher != "none":
        return _train_as_worker(request)
    if not request.show:
        # It imports torch on another core while this process does the same for itself.
        forkserver.start(_named_task(request), modules=(WORKER,))
    from allranks.training.prepare import choose_processes, prepare, resolve_layout

    prepared = prepare(request)
    num_processes, decision = choose_processes(prepared, request)
    layout = resolve_layout(prepared.config, num_processes)
    chosen = Decision(
        f"layout {layout}", "the config names it" if prepared.config.layout.chosen else "ddp is the default"
    )
    decisions = (decision, chosen)
    if request.show:
        return _show(request, prepared, num_processes, decisions)
    return _run(request, prepared, num_processes, decisions)


def _named_task(request: TrainRequest) -> str:
    named = request.task_spec
    if named is None and request.toml is not None and request.toml.is_file():
        named = read_task_spec(request.toml)
    return named or DEMO


def _train_as_worker(request: TrainRequest) -> int:
    from allranks.failure import run_recorded
    from allranks.lifeline import die_with_parent
    from allranks.training.worker import Assignment, work

    die_with_parent(os.getppid())
    rank = read_environment(os.environ).rank
    return run_recorded(work, (Assignment(request),), rank=rank, folder=None)


def _run(request: TrainRequest, prepared: "Prepared", num_processes: int, decisions: Sequence[Decision]) -> int:
    from allranks.surviving.agent import run_workers
    from allranks.training.prepare import open_run
    from allranks.training.worker import Assignment

    run = open_run(prepared, request)
    run.begin_attempt()
    method = forkserver.choose_start_method(_named_task(request), modules=(WORKER,))
    assignment = Assignment(request, run.path.resolve(), (*decisions, method.decision))
    outcome = run_workers(
        f"{WORKER}:work",
        (assignment,),
        nproc=num_processes,
        run_id=run.id,
        log_dir=run.log().parent,
        start_method=method,
    )
    run.release()
    if outcome.first_failure is not None:
        Console(stderr=True, highlight=False, soft_wrap=True).print(outcome.first_failure.render(), markup=False)
    if request.json and outcome.exit_code not in (0, 75, 130):
        print_json({"run": str(run.path), "exit_code": outcome.exit_code, "error": _one_line(outcome.first_failure)})
    return outcome.exit_code


def _show(request: TrainRequest, prepared: "Prepared", num_processes: int, decisions: Sequence[Decision]) -> int:
    """Config, batch cut and decisions, and nothing started."""
    from allranks.training.prepare import resolve_layout, show_cut

    config = prepared.config.flat()
    cut = show_cut(prepared.config, resolve_layout(prepared.config, num_processes))
    if request.json:
        facts = [{"what": decision.what, "because": decision.because} for decision in decisions]
        print_json({"task": prepared.spec or DEMO, "config": _plain(config), "cut": cut, "decisions": facts})
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"task {prepared.spec or DEMO}", markup=False)
    for name, value in config.items():
        if value is not None and name != "task.spec":
            console.print(f"  {name} = {value}", markup=False)
    console.print("one step", markup=False)
    for name, value in cut.items():
        console.print(f"  {name}: {value}", markup=False)
    for decision in decisions:
        console.print(f"- {decision}", markup=False)
    return 0


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _one_line(failure: Any) -> str | None:
    return None if failure is None else str(failure.message)
