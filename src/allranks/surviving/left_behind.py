"""What a dead run has left in this host's memory: whether somebody would miss it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.checkpointing.checkpoint import list_checkpoints, newest_good
from allranks.checkpointing.going_on import last_to_go_on
from allranks.checkpointing.host_memory import Record, is_distrusted, read_record
from allranks.errors import RunError
from allranks.run import Run


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


def left_behind(directory: Path) -> LeftBehind | None:
    """What would be lost with a directory that no supervisor holds; None: nothing.

    Nothing is lost where RUN is gone, where it has gone on elsewhere, or where its disk has a good one as new.
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
    return LeftBehind(record.run, copies[0]) if is_newer(copies[0], run) else None


def telling(say: Callable[[str], None], own: str) -> Callable[[Path], bool]:
    """Whether a directory would be missed, and what stays for that reason is said.

    Args:
        own: the id of the run that starts: what is left of it here its other commands may take over yet.
    """

    def missed(directory: Path) -> bool:
        if own in directory.name:
            return True
        found = left_behind(directory)
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


def is_newer(copy: Path, run: Run) -> bool:
    """Whether a copy is of a later step than all that is good on the run's disk.

    Every byte is read there, unless the names say enough: only what is good takes the place of a copy.
    """
    saved = list_checkpoints(run.checkpoints)
    if not saved or _order(saved[0]) < _order(copy):
        return True
    good, _ = newest_good(run.checkpoints, run.id)
    return good is None or _order(good.path) < _order(copy)


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # by number
