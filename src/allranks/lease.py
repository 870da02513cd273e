"""The lease of a Run directory: at most one process trains there.

It is an exclusive flock on RUN/lease, whose content says who holds it. The system drops the lock with its holder, so a
process that was killed never leaves a stale lease behind, and nobody has to guess from a pid whether it still lives.
"""

import fcntl
import json
import os
import secrets
import socket
import time
import weakref
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from allranks.errors import RunError
from allranks.ordinary_file import open_ordinary, read_record
from allranks.units import format_moment

PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a Run's lease; `since` in Unix seconds."""

    host: str
    pid: int
    since: float


@final
class Lease:
    """An exclusive lock on one file, held by at most one process of all hosts that share the file system."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, deposed: Collection[tuple[str, int]] = ()) -> None:
        """Take it, until `release` or the end of this process.

        Args:
            deposed: host and pid of holders of whom the caller knows that they may write no more, whether they live and
                know of it or not: it is taken from any of them.

        Raises:
            RunError: somebody else holds it; said within 2 s, with host, pid and since when.
            OSError: the file cannot be written, or its file system knows no locks.
        """
        if self._descriptor is not None:
            return
        # A little patience: a killed holder's children may need a moment to die, and `holder()` locks for an instant.
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (descriptor := _lock(self._path, os.O_RDWR | os.O_CREAT)) is None:
            if time.monotonic() > deadline:
                self._take_from(deposed)
                return
            time.sleep(0.02)
        self._hold(descriptor)

    def check(self) -> None:
        """See that what is held here has not been taken from this process; nothing where it is not held.

        Raises:
            RunError: it has: others took this process for dead.
        """
        if self._descriptor is not None and not self._is_still(self._descriptor):
            raise RunError(
                f"{_in_use(self._path.parent, self._read())}: it was taken from this process, which was silent"
            )

    def _take_from(self, deposed: Collection[tuple[str, int]]) -> None:
        seen = os.open(self._path, os.O_RDONLY)  # as long as it is open, no other file can be taken for this one
        try:
            holder = self._read()
            if holder is None or (holder.host, holder.pid) not in deposed:
                raise RunError(_in_use(self._path.parent, holder))
            self._replace(seen)
        finally:
            os.close(seen)

    def _is_still(self, descriptor: int) -> bool:
        """Whether it is this file that is at the path."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.lstat())
        except FileNotFoundError:
            return False

    def _replace(self, seen: int) -> None:
        """Put another file, locked already, in the place of the one seen, which somebody has locked, in one rename.

        Who took it meanwhile, while this process did not run, keeps it.
        """
        draft = self._path.with_name(f".{self._path.name}-{secrets.token_hex(4)}")
        descriptor = _lock(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        assert descriptor is not None, "nobody else knows this name"
        self._hold(descriptor)
        if not self._is_still(seen):
            self.forget()
            draft.unlink()
            raise RunError(_in_use(self._path.parent, self._read()))
        draft.replace(self._path)

    def _hold(self, descriptor: int) -> None:
        holder = Holder(socket.gethostname(), os.getpid(), round(time.time(), 3))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
        self._descriptor = descriptor
        _HELD.add(self)

    def stands(self) -> bool:
        """Whether the file that this process holds is still the one under its name: somebody may have removed it."""
        return self._descriptor is not None and self._is_still(self._descriptor)

    def release(self) -> None:
        """Give it back; nothing happens where it is not held."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            self.forget()

    def forget(self) -> None:
        """Close this process's descriptor only: the lock stays with whoever shares it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def holder(self) -> Holder | None:
        """Who holds it now, or None."""
        try:
            descriptor, _ = open_ordinary(self._path)
        except OSError:  # nothing that anybody could have locked
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return self._read() or Holder("an unknown host", 0, 0.0)
        finally:
            os.close(descriptor)
        return None

    def _read(self) -> Holder | None:
        try:
            return read_record(self._path, Holder)
        except (OSError, ValueError):
            return None


def _lock(path: Path, flags: int) -> int | None:
    """A locked descriptor of the file that is at `path`; None: somebody else has locked it, or put another there."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o644)  # through a link another file would be emptied
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _in_use(path: Path, holder: Holder | None) -> str:
    if holder is None:
        return f"{path} is in use by another process; wait for it to end, or start another run"
    owner = f"pid {holder.pid} on {holder.host} since {format_moment(holder.since)}"
    return f"{path} is in use by {owner}; wait for it to end, stop it, or start another run"


_HELD: weakref.WeakSet[Lease] = weakref.WeakSet()


def _forget_leases() -> None:
    # A forked child shares the lock: were its copy left open, a killed parent's lease would live as long as the child.
    for lease in list(_HELD):
        lease.forget()


os.register_at_fork(after_in_child=_forget_leases)
