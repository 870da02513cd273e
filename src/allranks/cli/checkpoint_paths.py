"""Which checkpoints a DIR on the command line means: a run, its `checkpoints` folder, or one `step-*` directory."""

import os
import re
from pathlib import Path

from allranks.errors import CheckpointError, RunError

_STEP = re.compile(r"step-\d{8,18}")


def find_checkpoints(directory: Path) -> list[Path]:
    """The checkpoint directories that DIR means, newest first. Raises RunError where it is no run and holds none."""
    from allranks.checkpointing.checkpoint import list_checkpoints

    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory; name a run, its checkpoints folder or a step-* directory")
    if _is_one(directory):
        return [directory]
    folder = _folder(directory)
    try:
        found = list_checkpoints(folder)
    except OSError as error:
        raise RunError(f"{folder} cannot be read: {error.strerror or error}") from None
    if not found and folder == directory and directory.name != "checkpoints":
        raise RunError(f"{directory} is no run and holds no checkpoint; name a run or a step-* directory")
    return found


def find_passed_over(directory: Path) -> dict[Path, str]:
    """What has a checkpoint's name below DIR and is none that a resume would take, and why."""
    from allranks.checkpointing.reading import COMMITTED_FILE

    if _is_one(directory) or not _folder(directory).is_dir():
        return {}
    found = {}
    for path in _folder(directory).iterdir():
        if _STEP.fullmatch(path.name) is None:
            continue
        if path.is_symlink() or not path.is_dir():
            found[path] = f"is a {'symbolic link' if path.is_symlink() else 'file'}, no directory; passed over"
        elif not os.path.lexists(path / COMMITTED_FILE):
            found[path] = f"is not committed (it has no {COMMITTED_FILE} file); passed over"
    return {path: reason for path, reason in found.items() if os.path.lexists(path)}  # its run may have been faster


def _is_one(directory: Path) -> bool:
    """Whether DIR is meant as a checkpoint itself; a run may have any name."""
    if (directory / "run.json").exists():
        return False
    return (directory / "manifest.json").exists() or _STEP.fullmatch(directory.name) is not None


def _folder(directory: Path) -> Path:
    return directory / "checkpoints" if (directory / "run.json").exists() else directory


def find_newest(directory: Path) -> Path:
    """The newest checkpoint that DIR means. Raises CheckpointError where there is none yet."""
    found = find_checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint yet; see checkpoint.every and checkpoint.seconds")
    return found[0]
