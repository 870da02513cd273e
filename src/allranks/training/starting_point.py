"""What a training goes on from: what is newer and lies farther is brought near, and the newest good one is taken."""

from collections.abc import Callable, Sequence
from pathlib import Path

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.going_on import note_going_on
from allranks.checkpointing.mirror import Mirror
from allranks.checkpointing.peers import Hosts
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.stepping.world import Processes
from allranks.training.fetching import fetch_newer, has_saved
from allranks.training.peer_copies import bring_copies
from allranks.training.snapshot import find_checkpoint

OPEN_MIRROR = "see that the place that checkpoint.mirror names is there, and that this user may read and write there"
SEE_MEMORY = "the run goes on from the newest that is whole; see which hosts are missing, or what fills their memory"


def find_starting_point(
    run: Run,
    processes: Processes,
    memory: Path | None,
    hosts: Hosts | None,
    mirror: Mirror | None,
    tell: Callable[[str, Sequence[str], str], None],
    progress: Callable[[], None] = lambda: None,
) -> tuple[Checkpoint | None, list[str]]:
    """As `find_checkpoint`, with what other hosts' memories and a mirror have, where that is newer; collective.

    Args:
        memory: where copies lie in the memory of this host: whole, or with `hosts` this one's part; None: nowhere.
        hosts: which ranks share a memory, where several may have parts.
        tell: takes what was brought, what was wrong with newer ones, and the remedy.
        progress: called on every rank whenever more has come from the mirror.

    Raises:
        CheckpointError: there are some, and none is good; or all that were here are gone, and the mirror has none that
            can be brought: to begin anew would replace there what it still has.
    """
    if hosts is not None:
        tell(*bring_copies(memory, run, processes, hosts), SEE_MEMORY)
        memory = None
    elif processes.rank == 0:
        note_going_on(run, first=False)  # what hosts may still have of an attempt before is not the newest any more
    if mirror is None:
        return find_checkpoint(run.checkpoints, run.id, processes, memory)
    found, damaged = None, None
    try:
        found = find_checkpoint(run.checkpoints, run.id, processes, memory)
    except CheckpointError as error:
        damaged = error  # what the mirror has is all there is
    nearer = None if found is None else found[0]
    fetched, wrong = fetch_newer(run, mirror, processes, nearer, progress)
    tell(fetched, wrong, OPEN_MIRROR)
    if fetched:
        return find_checkpoint(run.checkpoints, run.id, processes, memory)
    if found is None:
        assert damaged is not None
        raise damaged
    if found[0] is None and wrong and processes.share(processes.rank == 0 and has_saved(run)):
        raise CheckpointError(
            f"{run.checkpoints} has no checkpoint any more, and the mirror gives none: {wrong[0]}; {OPEN_MIRROR}, and "
            "start again; checkpoint.mirror=none begins anew"
        )
    return found
