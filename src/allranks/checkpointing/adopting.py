"""A committed checkpoint that comes from another place: whole and verified under its name, or not at all. No torch."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from allranks.checkpointing.checkpoint import Checkpoint, discard, step_name, verify_files
from allranks.checkpointing.commit import publish
from allranks.durable import sync
from allranks.errors import CheckpointError


def adopt(
    directory: Path, step: int, run: str, bring: Callable[[Path], object], advanced: Callable[[], None] = lambda: None
) -> Checkpoint:
    """Make it one of `directory`'s, in the place of the one of that step if there is one.

    Args:
        directory: of the run's checkpoints; made where it is missing.
        step: that it is of.
        run: the run's id.
        bring: brings its files into the empty directory that it is given.
        advanced: called as it comes further, and last before it becomes one of `directory`'s; where that raises, it
            does not.

    Raises:
        CheckpointError: what was brought is not whole, or of another run.
        OSError: the system's refusal.
    """
    target = directory / step_name(step)
    temporary = directory / f"{target.name}.tmp-fetched"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        bring(temporary)
        checkpoint = Checkpoint.open(temporary, run)
        verify_files(checkpoint, progress=advanced)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
            advanced()
        replaced = publish(temporary, target, partial(sync, directory))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if replaced is not None:
        with suppress(CheckpointError):
            discard(replaced)
    return Checkpoint.open(target, run)


def copy(checkpoint: Checkpoint, directory: Path) -> Checkpoint:
    """Bring a committed checkpoint into another directory of the same run. Raises as `adopt`."""

    def bring(empty: Path) -> None:
        for path in checkpoint.path.iterdir():
            shutil.copyfile(path, empty / path.name, follow_symlinks=False)

    return adopt(directory, checkpoint.step, checkpoint.manifest.run, bring)
