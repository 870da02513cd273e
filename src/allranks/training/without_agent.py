"""What ranks settle among themselves where torchrun, srun or mpirun has started them, and the command elsewhere.

That is the layout of a run that names none, and the Run directory. Rank 0 decides, and tells the others.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from allranks.checkpointing.looking_again import await_run
from allranks.errors import AllranksError, RunError
from allranks.failure import clear_failures
from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ProcessEnvironment
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.stepping.world import Processes, share
from allranks.training.prepare import Prepared, open_run, prepare
from allranks.verdict import Decision

TELL_SECONDS = 10.0


def settle_together(
    prepared: Prepared,
    request: TrainRequest,
    environment: ProcessEnvironment,
    choice: DeviceChoice,
    aside: Callable[..., Any] | None,
) -> Prepared:
    """`prepared` with what all have to have alike, by what rank 0 sees; collective over the default group.

    That is whether the Run directory is there, which a client of NFS on another host may remember otherwise, and the
    layout of a new run that names none; with None for `aside` nobody plans it.
    """
    told = {"kept": prepared.kept is not None, "is_open": prepared.is_open}
    if request.run is not None:
        told = share(told, choice.device)
    if told["kept"] and prepared.kept is None:
        assert request.run is not None
        await_run(request.run)
        prepared = prepare(request)
    if not told["is_open"] or aside is None:
        return prepared
    return plan_together(prepared, request, environment, choice, aside)


def plan_together(
    prepared: Prepared,
    request: TrainRequest,
    environment: ProcessEnvironment,
    choice: DeviceChoice,
    aside: Callable[..., Any],
) -> Prepared:
    """`prepared` with the layout that rank 0 decides for all; collective over the default group.

    Args:
        prepared: of a new run of several processes whose config names no layout.
        choice: as `start` has settled it; by its device this rank speaks to the others.
        aside: as `decide_layout`'s.
    """
    from allranks.training.planned_layout import Decided, decide_layout, settle

    told: dict[str, Any] = {}
    if environment.rank == 0:
        size, nodes = environment.world_size, environment.num_nodes
        # NCCL serves no two processes on one GPU.
        own = environment.own_device or choice.backend == "nccl"
        with _told_if_long(prepared.config.guard.longest_wait):
            found = decide_layout(prepared, request, size, aside, nodes, here=False, own_gpus=own)
        told = {"overrides": found.overrides, "document": found.document}
        told["decisions"] = [(one.what, one.because) for one in found.decisions]
    told = share(told, choice.device)
    decisions = tuple(Decision(*words) for words in told["decisions"])
    settled = settle(prepared, Decided(decisions, tuple(told["overrides"]), told["document"]))
    return replace(settled, decisions=(*prepared.decisions, *decisions))


@contextlib.contextmanager
def _told_if_long(seconds: float) -> Iterator[None]:
    """Say on rank 0's screen what the others wait for, and that they do so for `seconds`, where it is not soon over."""
    line = (
        f"rank 0 plans the layout, as long as the model's trace and its dataset() take; the other ranks wait for it up "
        f"to {seconds:g} s: --layout names one"
    )
    timer = threading.Timer(TELL_SECONDS, print, (line,), {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def share_run(prepared: Prepared, request: TrainRequest, processes: Processes) -> Run:
    """The Run on every rank: rank 0 makes or continues it, and holds its lease; collective.

    Raises RunError on all of them where rank 0 cannot.
    """
    found: dict[str, str] = {}
    run: Run | None = None
    if processes.rank == 0:
        try:
            run = open_run(prepared, request)
            run.begin_attempt()
            clear_failures(run.log().parent)  # of a start by a launcher that keeps records
            found = {"path": str(run.path.resolve())}
        except AllranksError as error:
            found = {"error": str(error)}
    found = processes.share(found)
    if "error" in found:
        raise RunError(found["error"])
    if run is None:
        await_run(Path(found["path"]))
        run = Run.open(Path(found["path"]))
    return run
