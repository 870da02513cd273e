"""`allranks train` from request to exit code: alone as a worker of an outside launcher, or as the agent of its own."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from allranks.cli.host_sizes import choose_workers, is_left_to_plan, layout_of_hosts, plan_for_hosts
from allranks.cli.in_workers import DEMO, WORKER, train_in_workers
from allranks.cli.output import print_json, stdout_kept_free
from allranks.cli.run_ended import Document, document
from allranks.cli.running_hosts import import_torch_quietly, run_on_hosts, take_secret_of
from allranks.config import read_task_spec
from allranks.config_sections import AXES, LayoutConfig
from allranks.errors import ConfigError
from allranks.hosts_request import HostsRequest
from allranks.launching.environment import ProcessEnvironment, read_environment
from allranks.layout_string import WORDS
from allranks.process_end import end_process
from allranks.reporting.plain import as_json
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving import forkserver
from allranks.surviving.open_files import provide_open_files
from allranks.surviving.unended import hinders_the_end
from allranks.verdict import Decision

if TYPE_CHECKING:
    from allranks.layout import Layout
    from allranks.training.prepare import Prepared

MOST_PROCESSES = 1024
"""Of one machine: far above its GPUs and cores."""
NAMES_A_LAYOUT = re.compile(rf"layout\.(kind|placement|{'|'.join(AXES)})\b")
"""An override that does; others only say how one is run."""


def train(request: TrainRequest) -> int:
    """Train as `request` says; the exit code of docs/reference/errors.md.

    Raises:
        AllranksError: what was asked cannot be done; nothing was started.
    """
    if not request.show:
        provide_open_files()
    environment = read_environment(os.environ)
    if request.show_sharding and environment.launcher != "none":
        raise ConfigError(
            f"--show-sharding starts its processes itself: leave {environment.launcher} out, say --nproc N"
        )
    if request.show and environment.rank > 0:
        return 0
    secret = take_secret_of(request, environment)
    outside = environment.launcher != "none" and not request.show
    with stdout_kept_free(request.json):
        code, told = _train_as_worker(request) if outside else _train_here(request, environment, secret)
    if request.json and told is not None:
        print_json(told)
    if outside or hinders_the_end():
        # This process ends here, not through its destructors, which can wait for ever (see end_process).
        end_process(code)
    return code


def _train_here(request: TrainRequest, environment: ProcessEnvironment, secret: bytes) -> tuple[int, Document | None]:
    """The exit code, and what `--json` prints."""
    hosts = request.hosts
    if not request.show:
        # It imports torch on another core while this process does the same for itself.
        forkserver.start(_named_task(request), modules=(WORKER,))
    if hosts is not None:
        import_torch_quietly()
        return _train_on_hosts(request, hosts, secret)
    from allranks.training.choose_processes import choose_processes
    from allranks.training.prepare import prepare, resolve_layout

    prepared = prepare(request)
    if environment.launcher == "none":
        num_processes, decision = choose_processes(prepared, request)
    else:
        num_processes = environment.world_size
        decision = Decision(f"{num_processes} processes", f"so many were started ({environment.launcher})")
    decided: Sequence[Decision] | None = None
    if num_processes > 1 and prepared.is_open:
        from allranks.surviving.aside import call_aside
        from allranks.training.planned_layout import decide_layout, settle

        place = (call_aside, environment.num_nodes)
        found = decide_layout(prepared, request, num_processes, *place, own_gpus=environment.own_device)
        prepared, decided = settle(prepared, found), found.decisions
        request = replace(request, overrides=(*request.overrides, *found.overrides))
    layout = resolve_layout(prepared.config, num_processes, environment.num_nodes)
    if decided is None:
        decided = [Decision(f"layout {layout}", _because_named(request, prepared.config.layout, layout))]
    decisions = (*prepared.decisions, decision, *decided)
    if request.show:
        return 0, _show(request, prepared, layout, decisions)
    if environment.launcher == "none":
        _check_many(num_processes)
    if request.show_sharding:
        from allranks.cli.sharding import show_sharding

        return show_sharding(request, layout, num_processes)
    return _run(request, prepared, num_processes, decisions)


def _train_on_hosts(request: TrainRequest, hosts: HostsRequest, secret: bytes) -> tuple[int, Document | None]:
    """As `_train_here`, of one host among several: of a new run that names no layout the one that leads plans it."""
    from allranks.training.prepare import prepare

    prepared = prepare(request)
    nproc, decision = choose_workers(prepared, request, hosts)
    decisions = (*prepared.decisions, decision)
    if not request.show:
        _check_many(nproc)
    if is_left_to_plan(prepared, nproc, hosts):
        if not request.show:
            return run_on_hosts(request, hosts, prepared, nproc, decisions, secret)
        prepared, decided = plan_for_hosts(prepared, request, hosts, nproc)
        layout, _ = layout_of_hosts(prepared, nproc, hosts)
    else:
        layout, told = layout_of_hosts(prepared, nproc, hosts)
        decided = (Decision(f"layout {layout}", _because_named(request, prepared.config.layout, layout)), *told)
    if request.show:
        return 0, _show(request, prepared, layout, (*decisions, *decided))
    return run_on_hosts(request, hosts, prepared, nproc, (*decisions, *decided), secret)


def _because_named(request: TrainRequest, config: LayoutConfig, layout: "Layout") -> str:
    """Why a layout is this one, which no plan chose."""
    if not config.chosen:
        return "ddp is the default" if layout.world_size > 1 else "there is one process"
    written = {axis: getattr(config, axis) for axis in AXES}
    if layout.kind != "single" or "*" not in written.values():
        typed = request.layout is not None or any(NAMES_A_LAYOUT.match(word) for word in request.overrides)
        return f"{'the command line' if typed else 'the config'} names it"
    starred = next(f"{axis}=*" for axis, degree in written.items() if degree == "*")
    named = next((word for word in WORDS if written == {axis: WORDS[word].get(axis, 1) for axis in AXES}), starred)
    saves_nothing = ": nobody is there to share with, so it saves no memory" if config.dp_shard == "*" else ""
    return f"{named} over one process is single{saves_nothing}"


def _check_many(processes: int) -> None:
    """Raises ConfigError for more than any machine runs, before they take the whole of this one's memory."""
    if processes > MOST_PROCESSES:
        raise ConfigError(
            f"{processes:,} processes on this machine: at most {MOST_PROCESSES:,}; --show says how a layout of a "
            "cluster is cut, `allranks plan` and `allranks dryrun` need none of its devices"
        )


def _named_task(request: TrainRequest) -> str:
    """The task whose module every worker needs: the arguments', the TOML file's, or that of the run to continue."""
    named = request.task_spec
    if named is None and request.toml is not None and request.toml.is_file():
        named = read_task_spec(request.toml)
    kept = next((path for path in (request.resume, request.run) if path and (path / "run.json").is_file()), None)
    if named is None and kept is not None:
        named = Run.open(kept).task
    return named or DEMO


def _train_as_worker(request: TrainRequest) -> tuple[int, Document | None]:
    from allranks.lifeline import die_with_parent
    from allranks.observing import heartbeat
    from allranks.recorded import run_recorded
    from allranks.surviving.aside import call_spawned
    from allranks.training.worker import Assignment, work

    environment = read_environment(os.environ)
    if environment.launcher != "environment":  # a shell that sets RANK may end before what it has started
        die_with_parent(os.getppid())
    rank = environment.rank
    runs: list[Path] = []
    assignment = Assignment(request, announce=runs.append, aside=call_spawned)
    code = run_recorded(work, (assignment,), rank=rank, folder=None, step=lambda: heartbeat.current().step)
    return code, document(runs[0], code) if rank == 0 and runs else None


def _run(
    request: TrainRequest, prepared: "Prepared", num_processes: int, decisions: Sequence[Decision]
) -> tuple[int, Document]:
    from allranks.checkpointing.host_memory import check_there
    from allranks.surviving.memory_tier import open_memory
    from allranks.surviving.supervisor import Supervision
    from allranks.training.prepare import open_run
    from allranks.training.shortage import halve_micro_batch

    copies = prepared.config.checkpoint.memory_every is not None
    if copies:
        check_there()
    run = open_run(prepared, request)
    memory = open_memory(run, wanted=copies)
    if memory is None:
        run.begin_attempt()
    else:
        memory.begin_attempt()
    supervision = Supervision.of_run(run, prepared.config.guard, partial(halve_micro_batch, run, num_processes))
    ended = train_in_workers(request, run, num_processes, decisions, supervision, memory=memory)
    run.release()
    return ended


def _show(
    request: TrainRequest, prepared: "Prepared", layout: "Layout", decisions: Sequence[Decision]
) -> Document | None:
    """Config, batch cut and decisions, and nothing started."""
    from allranks.training.prepare import show_cut

    config = prepared.config.flat()
    cut = show_cut(prepared.config, layout)
    if request.json:
        facts = [{"what": decision.what, "because": decision.because} for decision in decisions]
        return {"task": prepared.spec or DEMO, "config": as_json(config), "cut": cut, "decisions": facts}
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(f"task {prepared.spec or DEMO}")
    for name, value in config.items():
        if value is not None and name != "task.spec":
            console.print(f"  {name} = {value}")
    console.print("one step")
    for name, value in cut.items():
        console.print(f"  {name}: {value}")
    for decision in decisions:
        console.print(f"- {decision}")
    return None
