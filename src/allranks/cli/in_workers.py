"""A run that this command trains in processes of this host: it starts them, and tells how they ended."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks.cli.run_ended import Document, tell_end
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving import forkserver
from allranks.verdict import Decision

if TYPE_CHECKING:
    from allranks.surviving.hosts.company import Company
    from allranks.surviving.memory_tier import MemoryTier
    from allranks.surviving.peer_memory import PeerMemory
    from allranks.surviving.supervisor import Supervision

DEMO = "allranks.training.demo:Text"
WORKER = "allranks.training.worker"


def train_in_workers(
    request: TrainRequest,
    run: Run,
    nproc: int,
    decisions: Sequence[Decision],
    supervision: "Supervision",
    company: "Company | None" = None,
    memory: "MemoryTier | PeerMemory | None" = None,
) -> tuple[int, Document]:
    """Train in `nproc` processes, beside those of `company`'s other hosts; the exit code and what `--json` prints.

    `memory`: where this host keeps copies of the state, closed at the end.
    """
    from allranks.checkpointing.going_on import has_noted
    from allranks.surviving.agent import run_workers
    from allranks.training.time_limit import started_at
    from allranks.training.worker import Assignment

    method = forkserver.choose_start_method()
    directory = None if memory is None else memory.directory
    told = (*decisions, method.decision)
    # All hosts have to say the same, whatever each of them has: with copies asked for all have a directory, and without
    # one has it only where RUN tells all of them to look.
    peers = company is not None and (directory is not None or has_noted(run))
    assignment = Assignment(
        request,
        run.path.resolve(),
        told,
        memory=directory,
        peers=peers,
        first_attempt=run.attempts,
        began=started_at(),
    )
    try:
        outcome = run_workers(
            f"{WORKER}:work",
            (assignment,),
            nproc=nproc,
            run_id=run.id,
            log_dir=run.log().parent,
            start_method=method,
            stop_notice="stopping after the step in hand, then saving (once more: now)",
            supervision=supervision if memory is None else memory.followed(supervision),
            company=company,
            stop_grace_seconds=supervision.guard.stop_seconds,
        )
    finally:
        if memory is not None:
            memory.close()
    return tell_end(run, outcome)
