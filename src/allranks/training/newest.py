"""Which checkpoint of a run counts: the newest good one, never silently an older one, and never silently none."""

from pathlib import Path

from allranks.checkpointing.checkpoint import COMMITTED_FILE, Checkpoint, newest_good
from allranks.errors import CheckpointError

NAMED = 3


def newest_of_run(directory: Path, run: str) -> tuple[Checkpoint | None, list[str]]:
    """The newest good checkpoint, and why each newer one is none, newest first; None where there is not even a bad one.

    Args:
        directory: RUN/checkpoints.
        run: the run's id.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged: to begin anew would bury what is left.
    """
    checkpoint, skipped = newest_good(directory, run)
    bad = {skip.path: skip.reason for skip in skipped}
    # Its name is given after COMMITTED is in it, so one without has lost it since.
    for path in directory.glob("step-*[0-9]"):
        if path.is_dir() and ".tmp-" not in path.name and not (path / COMMITTED_FILE).exists():
            bad[path] = f"{path} has lost its {COMMITTED_FILE} file"
    newer = [path for path in bad if checkpoint is None or _order(path) > _order(checkpoint.path)]
    reasons = [bad[path] for path in sorted(newer, key=_order, reverse=True)]
    if checkpoint is None and reasons:
        more = f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
        raise CheckpointError(
            f"{directory} holds no good checkpoint: {'; '.join(reasons[:NAMED])}{more}. Bring one back from a copy, "
            "or start a new run"
        )
    return checkpoint, reasons


def _order(path: Path) -> tuple[int, str]:
    return len(path.name), path.name  # by number: beyond 99,999,999 steps there are more digits
