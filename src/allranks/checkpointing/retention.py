"""Which checkpoints of a run stay, and which go. No torch.

The newest few good ones stay, and every so-many-th for ever; the others go, and what dead writers have left. A quota
takes of the newest few as many as it must, down to the newest good one, and of no other kind any.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from allranks.checkpointing.checkpoint import (
    TEMPORARY,
    TRASH,
    Checkpoint,
    discard,
    list_checkpoints,
    read_manifest,
    set_aside,
    step_of,
    verify_files,
)
from allranks.checkpointing.reading import unless_read
from allranks.errors import CheckpointError


def prune(
    directory: Path | str,
    keep: int,
    run_id: str | None = None,
    *,
    token: str | None = None,
    generation: int | None = None,
    leased: Collection[Path] = (),
    check: Callable[[Checkpoint], None] = verify_files,
    check_oldest: Callable[[Checkpoint], None] | None = None,
    keep_every: int | None = None,
) -> list[Path]:
    """Delete what is older than the `keep` newest good checkpoints, and what dead writers left; return what went.

    A checkpoint goes only while `keep` newer ones have passed their checks in this call, so that damage which these
    find costs no good one; damaged ones go once they are older. For one process, with the run's lease held.

    Args:
        directory: of the run's checkpoints.
        keep: at least 1.
        run_id: of the run; those of another neither count nor go.
        leased: stay, however old they are; so does what somebody reads now (reading.py).
        token: of a save that may be under way now; its temporary directory stays.
        generation: the attempt that asks; what a later one writes stays, which may have taken over meanwhile.
        check: raises CheckpointError for one whose files are not good; `check_oldest`: of the oldest that stays.
        keep_every: those of every so-many-th step stay as well, for ever; None: none.

    Raises:
        CheckpointError: one cannot be deleted; whatever else can be has gone.
    """
    directory = Path(directory)
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint stays")
    good, old = 0, []
    candidates = list_checkpoints(directory)
    for path in candidates if len(candidates) > keep else ():
        if good == keep:
            old.append(path)
            continue
        with contextlib.suppress(CheckpointError):
            (check_oldest or check if good == keep - 1 else check)(Checkpoint.read(path, run_id))
            good += 1
    gone, refused = [], []
    for path in old:
        if keep_every is not None and step_of(path) % keep_every == 0:
            continue
        if path not in leased and (run_id is None or not _is_of_another(path, run_id)):
            try:
                if discard(path, lambda path: unless_read(path, set_aside)):
                    gone.append(path)
            except CheckpointError as error:
                refused.append(error)
    gone += collect_leftovers(directory, token, generation)
    if refused:
        raise refused[0]
    return gone


def _is_of_another(path: Path, run_id: str) -> bool:
    """Whether it says that it is of another run; what cannot be read says nothing."""
    with contextlib.suppress(CheckpointError):
        return read_manifest(path).run != run_id
    return False


def collect_leftovers(directory: Path, token: str | None = None, generation: int | None = None) -> list[Path]:
    """Delete what dead or deposed writers have begun to write; return what went.

    All but the save of this token, and what attempts after `generation` write. It loses its name first: a writer that
    wakes meanwhile commits all of it, or nothing.
    """
    gone = []
    for path in directory.iterdir() if directory.is_dir() else ():
        match = TEMPORARY.fullmatch(path.name)
        is_later = match and generation is not None and int(match["attempt"] or 0) > generation
        if is_later or not (path.name.startswith(TRASH) or (match and match["token"] != token)):
            continue
        with contextlib.suppress(OSError):  # its writer was faster, or nobody may delete it
            trash = set_aside(path) if match else path
            shutil.rmtree(trash, ignore_errors=True)
            if not trash.exists():
                gone.append(path)
    return gone


def bytes_in(directory: Path) -> int:
    """Bytes of all files in the directories below it, whatever they are; what vanishes meanwhile does not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
