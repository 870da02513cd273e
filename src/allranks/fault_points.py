"""Named places in the real program at which `allranks chaos` may break it on purpose.

The program says `reach("forward")` where a process passes such a place. That is one comparison, unless the environment
variable ALLRANKS_CHAOS names the folder of a trial, which `allranks chaos` alone sets:

    FOLDER/schedule.json       the Faults; without it, what each rank passes is only written down
    FOLDER/passed-RANK.json    which places a rank has passed, in which step, how often
    FOLDER/fired-NUMBER.json   that a Fault has happened: when, where, in which process

A Fault happens once over all restarts: its mark is there before it strikes. One that is due in a step strikes at the
first passing of its point that is not earlier than the one it names, so a restart that goes by another way meets it.
"""

import atexit
import contextlib
import ctypes
import errno
import json
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, final, get_args

VARIABLE: Final = "ALLRANKS_CHAOS"
SCHEDULE_FILE: Final = "schedule.json"

Kind = Literal["kill", "stop", "segfault", "exit", "raise", "enospc", "eio", "disconnect"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
DISK_ERRORS: Final[Mapping[str, int]] = {"enospc": errno.ENOSPC, "eio": errno.EIO}
EXIT_CODE: Final = 7  # of a fault that ends a process without a word

POINTS: Final[Mapping[str, str]] = {
    "start": "before the process meets the others",
    "resume": "after a checkpoint was read back",
    "data.next": "before the coming step's batch is loaded",
    "data.worker": "before that batch is waited for, where data.workers load it: one of these is struck",
    "forward": "before a micro-step's forward",
    "backward": "between a micro-step's forward and its backward; in a pipeline: behind a stage's backward",
    "agreement": "before the ranks agree on a step",
    "optimizer": "after an optimizer has moved its parameters, before the next one and before gradients go",
    "background.copy": "before a rank copies what an asynchronous checkpoint is written from",
    "background.written": "after a rank's part of an asynchronous checkpoint is on the disk, before it says so",
    "background.commit": "after the ranks have agreed that all parts are written, before the manifest",
    "checkpoint.stage": "before a rank writes its part of a checkpoint",
    "checkpoint.write": "before each piece of a rank's file",
    "checkpoint.sync": "between the last piece of a rank's file and its sync",
    "checkpoint.manifest": "between the ranks' files and the manifest",
    "checkpoint.rename": "before a checkpoint gets its name",
    "checkpoint.renamed": "after a checkpoint got its name, before that is on the disk",
    "checkpoint.remove": "between an old checkpoint's loss of its name and the deletion of its files",
    "evaluate": "before each batch of an evaluation",
}
"""Every point, and where it lies in the program."""

DISK_POINTS: Final = frozenset(name for name in POINTS if name.startswith("checkpoint."))
"""Where the system may refuse to write."""

WORKER_POINTS: Final = frozenset(("data.worker",))
"""Where a process of the data loader is struck, by `kill` alone, and its rank learns of it."""

UNCONNECTED_POINTS: Final = frozenset(("start",))
"""Where a process has no connection to others that could be cut."""

ONLY_AFTER_FAULTS: Final = frozenset(("resume",))
"""What an undisturbed run never passes."""


@final
@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one rank, and where.

    Attributes:
        number: its place in the schedule.
        point, rank, kind: where, to whom, what.
        step: optimizer steps begun since the first start when it is due.
        visit: the passing of the point within that step, from 1.
        after: the number of the Fault in whose recovery it happens, at the point's first passing; None: at `step`.
    """

    number: int
    point: str
    rank: int
    step: int
    visit: int
    kind: Kind
    after: int | None = None


@final
@dataclass(frozen=True, slots=True)
class Fired:
    """That a Fault has happened: when (Unix seconds), in which process, in which step."""

    number: int
    time: float
    pid: int
    step: int


class _Passing(threading.local):
    """Where one thread is: the step that its work belongs to, and how often it has passed each point in it."""

    def __init__(self) -> None:
        self.step = 0
        self.visits: Counter[str] = Counter()


class _Rank:
    """What one process knows of the trial that it is part of."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._pid = os.getpid()
        self._passing = _Passing()
        self._passed: dict[str, dict[int, int]] = {}
        schedule = folder / SCHEDULE_FILE
        self._due = [fault for fault in read_schedule(folder) if fault.rank == rank] if schedule.exists() else []
        self._gone: set[int] = set()
        if not schedule.exists():
            atexit.register(self._write_passed)

    def begin_step(self, step: int) -> None:
        self._passing.step = step
        self._passing.visits.clear()

    def reach(self, point: str) -> None:
        if os.getpid() != self._pid:
            return  # a process that this one has forked is no rank
        passing = self._passing
        passing.visits[point] += 1
        self._passed.setdefault(point, {})[passing.step] = passing.visits[point]
        for fault in self._due:
            if fault.point == point and fault.number not in self._gone and self._is_due(fault):
                self._strike(fault)

    def _is_due(self, fault: Fault) -> bool:
        if fault.after is not None:
            return fired_file(self._folder, fault.after).exists()
        return (self._passing.step, self._passing.visits[fault.point]) >= (fault.step, fault.visit)

    def _strike(self, fault: Fault) -> None:
        self._gone.add(fault.number)
        mark, told = fired_file(self._folder, fault.number), self._folder / f".firing-{fault.number}-{self._pid}"
        told.write_text(json.dumps(asdict(Fired(fault.number, time.time(), self._pid, self._passing.step))), "utf-8")
        try:
            os.link(told, mark)  # whole at once: the agent kills this process at any moment, if another one has died
        except FileExistsError:
            return  # it struck before a restart
        finally:
            told.unlink()
        break_here(fault)

    def _write_passed(self) -> None:
        if os.getpid() == self._pid:
            path = self._folder / f"passed-{self._rank}.json"
            path.write_text(json.dumps(self._passed), encoding="utf-8")


@final
class _Trial:
    """This process's part in a trial; None: there is none."""

    rank: _Rank | None = None


def join(environ: Mapping[str, str], rank: int) -> None:
    """Take part in the trial that `environ` names, as this rank; nothing where it names none."""
    folder = environ.get(VARIABLE)
    _Trial.rank = None if folder is None else _Rank(Path(folder), rank)


def reach(point: str) -> None:
    """This process passes `point`, one of POINTS."""
    if _Trial.rank is not None:
        _Trial.rank.reach(point)


def begin_step(step: int) -> None:
    """What this thread passes from here on belongs to optimizer step `step`, counted from 1 at the first start; 0 is
    before.
    """
    if _Trial.rank is not None:
        _Trial.rank.begin_step(step)


def break_here(fault: Fault) -> None:
    """Do to this process what the fault says. Returns where the process was only stopped or cut off, and goes on.

    Raises:
        OSError: the disk faults.
        RuntimeError: `raise`.
    """
    match fault.kind:
        case "kill":
            os.kill(_loading_process() if fault.point in WORKER_POINTS else os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            _end_without_a_word()
        case "raise":
            raise RuntimeError(f"allranks chaos: fault {fault.number}, at {fault.point} of rank {fault.rank}")
        case "disconnect":
            _cut_connections()
        case _:
            number = DISK_ERRORS[fault.kind]
            raise OSError(number, os.strerror(number), f"(allranks chaos: fault {fault.number}, at {fault.point})")


def _loading_process() -> int:
    """The process that loads data for this one; the youngest, which may have least of what is loaded ahead."""
    return max(child.pid for child in multiprocessing.active_children() if child.pid is not None)


def _end_without_a_word() -> NoReturn:
    os._exit(EXIT_CODE)


def _cut_connections() -> None:
    """End every TCP connection of this process, as a network does that resets them: both ends learn of it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is no socket, or not there any more
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6):
                        one.shutdown(socket.SHUT_RDWR)


def fired_file(folder: Path, number: int) -> Path:
    """The mark of a Fault."""
    return folder / f"fired-{number}.json"


def read_schedule(folder: Path) -> list[Fault]:
    """The Faults of a trial."""
    return [Fault(**fields) for fields in json.loads((folder / SCHEDULE_FILE).read_text(encoding="utf-8"))]


def write_schedule(folder: Path, faults: list[Fault]) -> None:
    """Make the Faults happen in what is started from now on."""
    (folder / SCHEDULE_FILE).write_text(json.dumps([asdict(fault) for fault in faults], indent=1), encoding="utf-8")


def read_fired(folder: Path) -> dict[int, Fired]:
    """Number -> what has happened."""
    marks = [_read(path) for path in sorted(folder.glob("fired-*.json"))]
    return {mark["number"]: Fired(**mark) for mark in marks}


def read_passed(folder: Path) -> dict[int, dict[str, dict[int, int]]]:
    """Rank -> point -> step -> how often it was passed there; of an undisturbed run that has ended."""
    found = {}
    for path in folder.glob("passed-*.json"):
        points = {name: {int(step): count for step, count in steps.items()} for name, steps in _read(path).items()}
        found[int(path.stem.partition("-")[2])] = points
    return found


def _read(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return fields
