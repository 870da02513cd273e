"""Why a worker ended: one record a worker writes and its agent reads, and how the first among several is found.

    exit code  0 done
               1 the user's code raised
              75 stopped from outside and saved
              76 transient: a peer, a port or the store was lost
              78 refused by a worker (a wrong key, task, layout, directory)
              93 no progress: it hung, or failed again and again at the same step
             130 Ctrl-C

When one worker fails, the others fail as a consequence ("Connection closed by peer"), often earlier by the clock than
the cause is seen. So a record says whether it looks like a consequence, and the first failure is the earliest that does
not.
"""

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import final

from allranks.errors import AllranksError, MemoryShortError, RollbackError, worker_exit_code
from allranks.ordinary_file import read_record
from allranks.raised import render_raised, without_our_frames

DONE, RAISED, PREEMPTED, TRANSIENT, NO_PROGRESS, INTERRUPTED = 0, 1, 75, 76, 93, 130
STOPS = (PREEMPTED, INTERRUPTED)
KNOWN_CODES = (DONE, RAISED, PREEMPTED, TRANSIENT, 78, NO_PROGRESS, INTERRUPTED)

# What gloo, NCCL and the store say in a process whose peer has gone. Only errors of torch's own are looked at.
PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Timed out waiting",
    "NCCL communicator was aborted",
    "remote process exited",
    "ncclRemoteError",
    "wait timeout after",
    "got 0 bytes",
    "Software caused connection abort",
    "Connection timed out",  # the network's, of a host that has vanished
    "No route to host",
)
TRACEBACK = "Traceback (most recent call last):"
TORCH_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")

# What NCCL's errors say besides where the device has failed, and no peer.
DEVICE_FAILED = ("CUDA error", "HIP error", "Cuda failure", "ncclUnhandledCudaError")

NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",  # NCCL's, which allocates for a group at its first collective
    "CUBLAS_STATUS_ALLOC_FAILED",
)

# Who says so without having come to an end of the work is not believed: all was made, or saved.
CLAIMS = (DONE, *STOPS)

# Signals that a program brings on itself; the others come from outside: the kernel for want of memory, a scheduler.
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")

NO_THREADS = (
    "no more threads may be started here: raise `ulimit -u`, or the container's limit (docker run --pids-limit)"
)

_SURROGATE = re.compile("[\ud800-\udfff]")


class AgreedStop(SystemExit):
    """Ends a process whose loop has saved, because a stop was agreed: its code (75 or 130) is true."""


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """One worker's end.

    Attributes:
        rank, host, pid: which process it was.
        time: when, in Unix seconds.
        exit_code: what it ends with, by the table above.
        message: one line (an error of allranks: all its lines).
        traceback: the worker's own, or "" where the message says all.
        signal: the name of the signal that killed it, or "".
        consequence: whether it looks like the loss of a peer rather than a cause.
        hung: whether the agent ended it because nothing went on; the verdict tells more.
        divisible: whether memory ran out in a step that can be made in smaller forwards.
        goes_back: whether the run goes around samples when it is started again, as often as guard.spike_times allows.
        noted: whether it was written while the error was still on its way out, so that the worker may have gone on.
    """

    rank: int
    host: str
    pid: int
    time: float
    exit_code: int
    message: str
    traceback: str = ""
    signal: str = ""
    consequence: bool = False
    hung: bool = False
    divisible: bool = False
    goes_back: bool = False
    noted: bool = False

    def brief(self) -> str:
        """One line."""
        between = " " if self.signal else ": "
        return f"rank {self.rank} on {self.host}{between}{self.message.partition(chr(10))[0]}"

    def render(self) -> str:
        """What a person reads, the error itself last."""
        where = f"rank {self.rank} on {self.host}"
        if self.signal:
            return f"{where} {self.message}"
        if not self.traceback:
            return f"{where}: {self.message}"
        ended = ", and ended before all was closed" if self.noted else ""
        return f"{where} failed{ended}:\n{self.traceback}".rstrip()

    def write(self, folder: Path) -> Path:
        """Record it in `folder`, whole or not at all."""
        path = record_file(folder, self.rank)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        text = json.dumps(asdict(self), ensure_ascii=False) + "\n"
        # Backslashes that JSON takes for letters: a path's bytes that are no UTF-8 make no record that cannot be read.
        temporary.write_bytes(_SURROGATE.sub(lambda found: rf"\\u{ord(found[0]):x}", text).encode())
        temporary.replace(path)
        return path


def record_file(folder: Path, rank: int) -> Path:
    """Where a rank records its failure."""
    return folder / f"failure-{rank:05d}.json"


def log_file(folder: Path, rank: int) -> Path:
    """Where what a rank prints is kept."""
    return folder / f"rank-{rank:05d}.log"


class StoppedBeforeStart(BaseException):
    """A request to stop came before there were workers to pass it on to: past all that catches Exception.

    Attributes:
        name: of the signal.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def describe_error(error: BaseException, rank: int, step: int | None = None) -> Failure:
    """The Failure of an exception that ended a worker; `step`: the last one that it has done, where it counts them."""
    if isinstance(error, RuntimeError) and refuses_threads(str(error)):
        error.add_note(f"allranks: {NO_THREADS}")
    text, message = render_raised(error)
    failure = Failure(rank, socket.gethostname(), os.getpid(), time.time(), RAISED, message)
    if isinstance(error, AllranksError):
        told = replace(failure, exit_code=worker_exit_code(error), message=str(error), consequence=_lost_a_peer(error))
        divisible = isinstance(error, MemoryShortError) and error.divisible
        return replace(told, divisible=divisible, goes_back=isinstance(error, RollbackError))
    if isinstance(error, StoppedBeforeStart):
        return replace(failure, exit_code=TRANSIENT, message=f"stopped by {error.name} before the run started")
    if isinstance(error, KeyboardInterrupt):
        return replace(failure, exit_code=INTERRUPTED, message="stopped by Ctrl-C")
    if isinstance(error, SystemExit):
        code = TRANSIENT if error.code == TRANSIENT else RAISED  # of the other codes we alone know the meaning
        given = "" if error.code is None else repr(error.code)
        message = f"the user's code ended the process{_after(step)}: sys.exit({given})"
        frames = "".join(traceback.format_tb(without_our_frames(error).__traceback__))
        return replace(failure, exit_code=code, message=message, traceback=f"{TRACEBACK}\n{frames}{message}\n")
    lost = _lost_a_peer(error)
    return replace(failure, exit_code=TRANSIENT if lost else RAISED, traceback=text, consequence=lost)


def describe_signal(number: int, *, rank: int, pid: int, when: float) -> Failure:
    """The Failure of a worker of this host that a signal killed."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    crashed = name in CRASHES
    message = f"was killed by {name}"
    if name == "SIGKILL":
        message += ": by somebody's kill -9, or by the kernel for want of memory (`dmesg` tells)"
    elif name == "SIGBUS":
        message += (
            ": it touched memory that is not there: a mapped file (of the data) was cut short, or /dev/shm is full; "
            "its log has the stack of each thread"
        )
    elif crashed:
        message += ": a crash in compiled code; its log has the stack of each thread"
    return Failure(
        rank, socket.gethostname(), pid, when, RAISED if crashed else TRANSIENT, message, signal=name.split()[-1]
    )


def describe_exit(code: int, *, rank: int, pid: int, when: float, step: int | None = None) -> Failure:
    """The Failure of a worker of this host that ended with a code and left no record.

    Args:
        step: the last one that it has done, where that is known.
    """
    exit_code = code if code in KNOWN_CODES and code not in CLAIMS else RAISED
    why = "and no word why"
    if code in CLAIMS:
        why = "its work neither done nor saved: something in it called os._exit() or exit()"
    message = f"ended with exit code {code}{_after(step)}, {why}"
    return Failure(rank, socket.gethostname(), pid, when, exit_code, message)


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: Python's, torch's on a device or on the CPU, or that of a library of CUDA's."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in kinds:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def read_failures(folder: Path) -> list[Failure]:
    """The records in `folder`, by rank; one that cannot be read is left out."""
    found = []
    for path in sorted(folder.glob("failure-*.json")):
        try:
            found.append(read_record(path, Failure))
        except (OSError, ValueError):
            continue
    return found


def clear_failures(folder: Path, ranks: Iterable[int] | None = None, num_ranks: int | None = None) -> None:
    """Remove the records of an earlier attempt, and what a worker that was killed while it wrote has left: of these
    ranks only, since other hosts may share the folder, and of those that an attempt of `num_ranks` lacks.
    """
    _remove(folder, ranks, "failure-{}.json", *UNFINISHED)
    if num_ranks is not None:
        _remove(folder, [one.rank for one in read_failures(folder) if one.rank >= num_ranks], "failure-{}.json")


def refuses_threads(text: str) -> bool:
    """Whether torch or Python say so that they may start no more threads; a socket's EAGAIN is another thing."""
    again = "Resource temporarily unavailable"
    return "can't start new thread" in text or again == text.strip() or (again in text and "thread" in text)


def clear_unfinished(folder: Path, ranks: Iterable[int] | None = None) -> None:
    """Remove what workers that have ended were in the middle of writing, of these ranks only or of all."""
    _remove(folder, ranks, *UNFINISHED)


UNFINISHED = ("failure-{}.*.tmp", "rank-{}.collectives.*.tmp")


def _remove(folder: Path, ranks: Iterable[int] | None, *patterns: str) -> None:
    for rank in ["*"] if ranks is None else [f"{rank:05d}" for rank in ranks]:
        for pattern in patterns:
            for path in folder.glob(pattern.format(rank)):
                path.unlink(missing_ok=True)


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest that is no consequence; where all are, the earliest; None of none. Agreed stops come last."""
    return min(failures, key=lambda one: (one.exit_code in STOPS, one.consequence, one.time), default=None)


def _lost_a_peer(error: BaseException | None) -> bool:
    while error is not None:
        if _says_peer_lost(error):
            return True
        error = error.__cause__
    return False


def _says_peer_lost(error: BaseException) -> bool:
    kinds = {kind.__name__ for kind in type(error).__mro__[:2]}
    return bool(kinds & set(TORCH_ERRORS)) and any(text in str(error) for text in PEER_LOST)


def is_of_peers(error: BaseException) -> bool:
    """Whether a collective failed because of another rank or the way to it: by the words, or by the class of what a
    backend raises unless it says that memory ran out or that the device failed.
    """
    if is_out_of_memory(error):
        return False
    backends = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return _says_peer_lost(error) or (backends and not any(text in str(error) for text in DEVICE_FAILED))
