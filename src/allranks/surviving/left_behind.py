"""What a dead run has left in this host's memory: whether somebody would miss it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, newest_good, verify_files
from allranks.checkpointing.going_on import last_to_go_on
from allranks.checkpointing.host_memory import Record, is_distrusted, read_record
from allranks.errors import RunError
from allranks.run import Run
from allranks.units import format_bytes

TOLD_BYTES = 1 << 33
"""Reading so much takes ten seconds and more, in which a command does nothing else."""


@final
@dataclass(frozen=True, slots=True)
class LeftBehind:
    """A copy that a run would go on from, and that its disk has not.

    Attributes:
        run: RUN.
        copy: the newest one.
    """

    run: Path
    copy: Path

    def __str__(self) -> str:
        return (
            f"{self.copy} stays in the memory of this host: {self.run} has nothing as new on its disk; "
            f"`allranks train --resume {self.run}` goes on from it, or delete {self.copy.parent}"
        )


def left_behind(directory: Path, say: Callable[[str], None]) -> LeftBehind | None:
    """What would be lost with a directory that no supervisor holds; None: nothing.

    Nothing is lost where RUN is gone, where it has gone on elsewhere, or where its disk has a good one as new.

    Args:
        say: is told of what is read for long.
    """
    record, copies = read_record(directory), list_checkpoints(directory)
    if record is None or not copies or is_distrusted(directory):
        return None
    try:
        run = Run.open(record.run)
    except RunError:
        return LeftBehind(record.run, copies[0]) if (record.run / "run.json").exists() else None
    if not counts_for(run, record, directory):
        return None
    return LeftBehind(record.run, copies[0]) if is_newer(copies[0], run, say) else None


def telling(say: Callable[[str], None], own: str) -> Callable[[Path], bool]:
    """Whether a directory would be missed, and what stays for that reason is said.

    Args:
        own: the id of the run that starts: what is left of it here its other commands may take over yet.
    """

    def missed(directory: Path) -> bool:
        if own in directory.name:
            return True
        found = left_behind(directory, say)
        if found is not None:
            say(f"note: {found}")
        return found is not None

    return missed


def counts_for(run: Run, record: Record, directory: Path) -> bool:
    """Whether the copies are this run's, and its newest attempt knows of them: by its name; or of several hosts' the
    last that went on, by its number.
    """
    last = last_to_go_on(run)
    known = {run.attempt, str(run.attempts if last is None else last)}
    return run.id in directory.name and bool(known & {*record.attempts})


def is_newer(copy: Path, run: Run, say: Callable[[str], None]) -> bool:
    """Whether a copy is of a later step than all that is good on the run's disk.

    Every byte is read there, unless the names say enough: only what is good takes the place of a copy.

    Args:
        say: is told of what is read for long.
    """
    saved = list_checkpoints(run.checkpoints)
    if not saved or _order(saved[0]) < _order(copy):
        return True
    good, _ = newest_good(run.checkpoints, run.id, partial(verify_aloud, say=say))
    return good is None or _order(good.path) < _order(copy)


def verify_aloud(checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
    """As `verify_files`; of what is large it is said first: nobody else shows that anything goes on."""
    if checkpoint.num_bytes >= TOLD_BYTES:
        say(f"note: reading {checkpoint.path} ({format_bytes(checkpoint.num_bytes)}) to see that it is whole")
    verify_files(checkpoint)


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # by number
