"""Who reads a checkpoint holds it, so that retention leaves it where it is meanwhile. No torch.

It is a shared flock on the COMMITTED file, which needs no right to write, so that a run of somebody else can be read;
the system drops it with its holder, however that ended. Who deletes needs the exclusive one. Where a file system knows
no locks nothing is held, and nothing is said: neither the reader nor the run could do anything about it.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from allranks.errors import CheckpointError

COMMITTED_FILE: Final = "COMMITTED"
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # neither a link nor a pipe leads elsewhere or waits


@contextmanager
def held(path: Path | str) -> Iterator[None]:
    """While entered, `prune` does not delete the checkpoint at `path`; any number of processes may hold it.

    What was never committed is not held: who opens it says so.

    Raises:
        CheckpointError: it is being deleted, or has just been.
    """
    file = Path(path) / COMMITTED_FILE
    descriptor = _open(file, os.O_RDONLY)
    try:
        if descriptor is not None and not (_lock(descriptor, fcntl.LOCK_SH) and os.path.lexists(file)):
            raise CheckpointError(
                f"{path} is being deleted: it is older than those that its run keeps; take a newer one"
            )
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def unless_read(path: Path, rename: Callable[[Path], Path]) -> Path | None:
    """Have a checkpoint renamed if nobody holds it; its new name, or None. Raises what `rename` raises.

    What is left of it is deleted afterwards, when this holds none of its files open: a client of NFS would keep such a
    one under another name, and the directory could not be removed.
    """
    file = path / COMMITTED_FILE
    descriptor = _open(file, os.O_RDWR)  # over NFS an exclusive lock wants the right to write
    if descriptor is None:
        descriptor = _open(file, os.O_RDONLY)
    try:
        if descriptor is not None and not _lock(descriptor, fcntl.LOCK_EX):
            return None
        return rename(path)  # with the lock: who comes now finds that it is being deleted
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(file: Path, access: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(file, access | _FLAGS)
    return None


def _lock(descriptor: int, kind: int) -> bool:
    """Whether no other lock is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True
