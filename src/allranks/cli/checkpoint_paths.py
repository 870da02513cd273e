"""Which checkpoints a DIR on the command line means: a run, its `checkpoints` folder, or one `step-*` directory."""

from pathlib import Path

from allranks.errors import CheckpointError, RunError


def find_checkpoints(directory: Path) -> list[Path]:
    """The checkpoint directories that DIR means, newest first. Raises RunError where it is no run and holds none."""
    from allranks.checkpointing.checkpoint import list_checkpoints

    if not directory.is_dir():
        raise RunError(f"{directory}: no such directory; name a run, its checkpoints folder or a step-* directory")
    if (directory / "manifest.json").exists() or directory.name.startswith("step-"):
        return [directory]
    folder = directory / "checkpoints" if (directory / "run.json").exists() else directory
    found = list_checkpoints(folder)
    if not found and folder == directory and directory.name != "checkpoints":
        raise RunError(f"{directory} is no run and holds no checkpoint; name a run or a step-* directory")
    return found


def find_newest(directory: Path) -> Path:
    """The newest checkpoint that DIR means. Raises CheckpointError where there is none yet."""
    found = find_checkpoints(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no checkpoint yet; the next one comes at checkpoint.every steps")
    return found[0]
