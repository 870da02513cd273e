"""A run's directory in the memory of this host, in which copies of its state outlive a killed worker. No torch.

    /dev/shm/allranks-run-<id>/lease             locked by the process that supervises the run, for as long as it lives
    /dev/shm/allranks-run-<id>/record.json       whose copies they are: RUN's path, and the attempts that know of them
    /dev/shm/allranks-run-<id>/step-00000200/    a checkpoint like any other (checkpoint.py)
    /dev/shm/allranks-run-<id>/distrusted        a guard has ended the run: no copy that lies here counts
    /dev/shm/allranks-part-<id>-0/               of a run on several hosts: what this one has (peers.py)

The system drops the lock with its process, however that dies: what nobody holds is of a dead run. The next start of
that run takes it over; the next start of another one on this host removes it where nobody would miss it.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.durable import refusing
from allranks.errors import ConfigError, RunError
from allranks.lease import Lease

SHARED_MEMORY: Final = Path("/dev/shm")
KEEP_IT: Final = "a logout may take it along: `loginctl enable-linger`, or RemoveIPC=no in systemd's logind.conf"
_PREFIX: Final = "allranks-run-"
_GONE: Final = ".gone-"
_PART: Final = "allranks-part-"
_MOST_PARTS: Final = 64  # commands of one run that keep copies on one machine, as tests start them
_DIRECTORY = re.compile(r"allranks-(run-[0-9a-f]{16}|part-[0-9a-f]{16}-\d+)(\.gone-[0-9a-f]{8})?")
_LEASE, _RECORD, _DISTRUSTED = "lease", "record.json", "distrusted"
_TRIES = 10  # to take a directory that starts of other runs remove as dead before it is leased


def check_there(root: Path = SHARED_MEMORY) -> None:
    """See that this system has memory that looks like a directory. Raises ConfigError: it has not."""
    if not os.access(root, os.W_OK | os.X_OK):
        raise ConfigError(
            f"checkpoint.memory_every: {root} is not there, or not to be written to: copies in the memory of a host "
            "need it; leave the key out"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """Whose copies a directory has.

    Attributes:
        run: RUN, an absolute path.
        attempts: that the copies are the newest state of: who goes on after another one goes on from something else.
    """

    run: Path
    attempts: tuple[str, ...]


def read_record(directory: Path) -> Record | None:
    """What its newest holder has noted; None: nothing that can be read."""
    try:
        found = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        return Record(Path(found["run"]), tuple(found["attempts"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write_record(directory: Path, record: Record) -> None:
    """Replace the record, at once. Raises RunError: the system refuses."""
    path, draft = directory / _RECORD, directory / f".{_RECORD}.tmp"
    with refusing(directory):
        draft.write_text(json.dumps({"run": str(record.run), "attempts": record.attempts}), encoding="utf-8")
        draft.replace(path)


@final
class HostMemory:
    """The directory of one run, for the process that supervises it.

    Attributes:
        directory: where the copies lie.
    """

    def __init__(self, run_id: str, root: Path = SHARED_MEMORY, part: int | None = None) -> None:
        self.directory = root / (f"{_PREFIX}{run_id}" if part is None else f"{_PART}{run_id}-{part}")
        self._lease = Lease(self.directory / _LEASE)

    @classmethod
    def open_part(cls, run_id: str, root: Path = SHARED_MEMORY) -> "HostMemory":
        """The first that no other command of this machine holds, for what it has of a run on several hosts.

        Raises:
            RunError: the system refuses.
        """
        for number in range(_MOST_PARTS):
            memory = cls(run_id, root, number)
            if os.path.lexists(memory.directory) and not is_own(memory.directory):
                continue  # whoever it is, the name is taken
            if memory._lease.holder() is None:
                memory.open()
                return memory
        raise RunError(f"{root} has {_MOST_PARTS} directories of this run that others hold")

    def open(self) -> None:
        """Take it, take it over, or make it again where it has vanished.

        Raises:
            RunError: somebody else supervises the run on this host, or the system refuses.
        """
        self._lease.release()
        with refusing(self.directory):
            self._acquire()

    def stands(self) -> bool:
        """Whether it is there, and this process holds it. Others may remove it: systemd does at a logout."""
        return self._lease.stands()

    def clear(self) -> list[Path]:
        """Remove the copies, and what was held against them; the copies that went. Raises RunError."""
        gone = list_checkpoints(self.directory)
        with refusing(self.directory):
            for path in gone:
                shutil.rmtree(path)
            trust(self.directory)
        return gone

    def note(self, record: Record) -> None:
        """Replace the record, at once. Raises RunError: the system refuses."""
        write_record(self.directory, record)

    def close(self) -> None:
        """Remove it, with all that is in it, if it is there. Raises RunError: the system refuses."""
        with refusing(self.directory), contextlib.suppress(FileNotFoundError):
            _remove(self.directory)
        self.release()

    def release(self) -> None:
        """Leave it as it is to whoever starts next."""
        self._lease.release()

    def _acquire(self) -> None:
        for _ in range(_TRIES):
            self.directory.mkdir(mode=0o700, exist_ok=True)
            if not is_own(self.directory):
                raise RunError(f"{self.directory} belongs to another user, or is no directory: have it removed")
            self.directory.chmod(0o700)
            with contextlib.suppress(FileNotFoundError):
                self._lease.acquire()
            if self._lease.stands():
                return
            self._lease.release()
        raise RunError(f"{self.directory} vanishes again and again: see who deletes it")


def is_open(directory: Path) -> bool:
    """Whether its supervisor's lease is still there: for workers, which do not hold it."""
    return (directory / _LEASE).exists()


def distrust(directory: Path) -> None:
    """No copy in it counts any more, whoever looks, and whatever is still being written: a guard has ended the run."""
    (directory / _DISTRUSTED).touch()


def trust(directory: Path) -> None:
    """What was held against copies is gone with them."""
    (directory / _DISTRUSTED).unlink(missing_ok=True)


def is_distrusted(directory: Path) -> bool:
    """Whether copies in it may hold what a guard has found."""
    return (directory / _DISTRUSTED).exists()


def left_of(run_id: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """What is there of one run, half removed or not."""
    return sorted(path for prefix in (_PREFIX, _PART) for path in root.glob(f"{prefix}{run_id}*"))


def parts_of(run_id: str, root: Path = SHARED_MEMORY) -> list[Path]:
    """What commands have left here of a run on several hosts."""
    return sorted(path for path in root.glob(f"{_PART}{run_id}-*") if _GONE not in path.name)


def remove_dead(spared: Path, missed: Callable[[Path], bool], root: Path = SHARED_MEMORY) -> list[Path]:
    """Remove what this user's runs have left there whose supervisors are dead; what went.

    Args:
        spared: stays, whoever holds it.
        missed: whether somebody would miss a directory that nobody holds: it stays then. Asked while it is leased.
    """
    gone = []
    for path in sorted(path for prefix in (_PREFIX, _PART) for path in root.glob(f"{prefix}*")):
        if path == spared or not _DIRECTORY.fullmatch(path.name) or not is_own(path):
            continue
        lease = Lease(path / _LEASE)
        with contextlib.suppress(OSError, RunError):  # taken, or removed by somebody else, in this moment
            if lease.holder() is None:
                lease.acquire()
                if lease.stands() and (_GONE in path.name or not missed(path)):
                    _remove(path)
                    gone.append(path)
        lease.release()
    return gone


def _remove(path: Path) -> None:
    """Whoever holds the lease: take the name away, then what it stood for."""
    gone = path.with_name(f"{path.name.partition('.')[0]}{_GONE}{secrets.token_hex(4)}")
    path.rename(gone)
    shutil.rmtree(gone)


def is_own(path: Path) -> bool:
    """Whether it is a directory of this user, and no link to one."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
