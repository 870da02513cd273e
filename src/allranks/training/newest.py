"""Which checkpoint of a run counts: the newest good one, never silently an older one, and never silently none."""

from collections.abc import Callable, Sequence
from pathlib import Path

from allranks.checkpointing.checkpoint import Checkpoint, newest_good, verify_files
from allranks.checkpointing.reading import COMMITTED_FILE
from allranks.checkpointing.writers import tell_writers
from allranks.errors import CheckpointError

NAMED = 3


def newest_of_run(
    directory: Path, run: str, memory: Path | None = None, check: Callable[[Checkpoint], None] = verify_files
) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint, and why each newer one is none, newest first; None where there is not even a bad one.

    Copies in memory come and go: where all of them are damaged and the disk has none, there is none.

    Args:
        directory: RUN/checkpoints. Nothing in it is read where nothing in it is newer than what memory has.
        run: the run's id.
        memory: where copies lie in the memory of this host; None: nowhere.
        check: raises CheckpointError for one that is not good; by default it reads every byte.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged: to begin anew would bury what is left.
    """
    checkpoint, bad = (None, {}) if memory is None else _look(memory, run, check)
    if checkpoint is None or any(_order(path) > _order(checkpoint.path) for path in _named(directory)):
        saved, damaged = _look(directory, run, check)
        bad |= damaged
        if saved is not None and (checkpoint is None or saved.step > checkpoint.step):
            checkpoint = saved
    newer = [path for path in bad if checkpoint is None or _order(path) > _order(checkpoint.path)]
    newer.sort(key=_order, reverse=True)
    on_disk = [bad[path] for path in newer if path.parent == directory]
    if checkpoint is None and on_disk:
        more = f"; and {len(on_disk) - NAMED} more" if len(on_disk) > NAMED else ""
        raise CheckpointError(
            f"{directory} holds no good checkpoint: {'; '.join(on_disk[:NAMED])}{more}. Bring one back from a copy, "
            "or start a new run"
        )
    return checkpoint, [bad[path] for path in newer]


def resume_warnings(directory: Path, found: Checkpoint | None, skipped: Sequence[str], attempts: int) -> list[str]:
    """What is said before a run goes on, a line each.

    Args:
        directory: RUN/checkpoints.
        found: what it goes on from. skipped: why each newer one is none.
        attempts: of the run, this one counted.
    """
    lines = tell_writers((directory.parent, directory)) if found is not None else []
    lines += [f"passed over a newer checkpoint: {reason}" for reason in skipped]
    if found is None and attempts > 1:
        lines.append("there is no checkpoint yet: the run starts from the beginning")
    return lines


def _look(directory: Path, run: str, check: Callable[[Checkpoint], None]) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest good one of a directory, and why others are none."""
    checkpoint, skipped = newest_good(directory, run, check)
    bad = {skip.path: skip.reason for skip in skipped}
    for path in _named(directory):
        # A name is given after it is in there: it was lost since, unless all of it has been deleted meanwhile.
        if not (path / COMMITTED_FILE).exists() and path.is_dir():
            bad[path] = f"{path} has lost its {COMMITTED_FILE} file"
    return checkpoint, bad


def _named(directory: Path) -> list[Path]:
    return [path for path in directory.glob("step-*[0-9]") if path.is_dir() and ".tmp-" not in path.name]


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # by number: beyond 99,999,999 steps there are more digits
