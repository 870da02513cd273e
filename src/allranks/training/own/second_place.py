"""Where a loop of one's own goes on from, and what brings its checkpoints to a mirror: as a Task's training has it."""

from collections.abc import Sequence

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.mirror import Mirror
from allranks.training.mirroring import Mirroring
from allranks.training.newest import resume_warnings
from allranks.training.own.ground import Ground
from allranks.training.own.run import Logbook
from allranks.training.snapshot import find_checkpoint
from allranks.training.starting_point import find_starting_point


def find_where_to_go_on(ground: Ground, logbook: Logbook) -> tuple[Checkpoint | None, list[str], Mirroring | None]:
    """The newest good checkpoint, also of the mirror; what is to be warned of; and on rank 0 who fills the mirror.

    Collective. Raises CheckpointError: there are some, and none is good; or as `find_starting_point`.
    """
    run, processes, config = logbook.run, ground.processes, ground.config
    mirroring = None
    if (url := config.checkpoint.mirror) is None:
        found, skipped = find_checkpoint(run.checkpoints, run.id, processes)
    else:
        mirror = Mirror(url, run.id, config.guard.elsewhere_seconds)

        def tell(brought: str, wrong: Sequence[str], remedy: str) -> None:
            for line in (*(f"warning: {reason}; {remedy}" for reason in wrong), brought):
                if line:
                    logbook.say(line)

        found, skipped = find_starting_point(run, processes, None, None, mirror, tell)
        if processes.rank == 0:
            saves = config.checkpoint
            mirroring = Mirroring(mirror, saves.keep, saves.keep_every, lambda line: logbook.say(f"warning: {line}"))
            if found is not None:
                mirroring.bring(found)  # who saved it may have died before it was there
    return found, resume_warnings(run.checkpoints, found, skipped, run.attempts), mirroring
