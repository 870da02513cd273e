"""A worker writes down why it ends: where its error is first met, and again when all is closed.

NCCL's watchdog meets an error of the device within about 100 ms, too, and aborts the process, while the loader and the
recorder are still being closed. So `note_error` writes a record before anything is closed. It is a note: who reads it
believes it where the worker did not come to its end (surviving/outcome.py). What comes to be known later is written
over it, and where the worker goes on after all, it is taken back.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, final

from allranks.failure import DONE, Failure, describe_error, is_out_of_memory, log_file, record_file
from allranks.ordinary_file import open_to_append

# In the words of torch, of its RuntimeErrors and AcceleratorErrors: no later call of the device succeeds.
DEVICE_LOST = ("CUDA error", "HIP error")
DEVICE_ERRORS = ("RuntimeError", "AcceleratorError")


@final
@dataclass(slots=True)
class _Worker:
    """The worker that this process is: its rank, where it records (None: nowhere), and whether a note stands there."""

    rank: int
    folder: Path | None
    pid: int
    noted: bool = False


@final
class _Process:
    """What this process is; None: no worker that records."""

    worker: _Worker | None = None


def run_recorded(
    entry: Callable[..., int | None],
    args: Sequence[Any],
    *,
    rank: int,
    folder: Path | None,
    step: Callable[[], int | None] = lambda: None,
) -> int:
    """Call `entry(*args)` as the whole of a worker; its exit code, or the code of the error that it raised.

    An error is recorded in `folder` (None: only shown), in the rank's log there, and for torchrun where it asks. So is
    every SystemExit: what the user's code calls in the middle is no end of the work.

    Args:
        step: gives the last step that is done, where steps are counted.
    """
    _Process.worker = _Worker(rank, folder, os.getpid())
    try:
        code = entry(*args) or DONE
        forget_error()
        return code
    except BaseException as error:
        return record_failure(error, rank=rank, folder=folder, step=step())
    finally:
        _Process.worker = None


def record_failure(error: BaseException, *, rank: int, folder: Path | None, step: int | None = None) -> int:
    """Write down the error that ends this worker; the exit code to end with. `step`: as of describe_error."""
    failure = describe_error(error, rank, step)
    try:
        if folder is not None:
            failure.write(folder)
            descriptor = open_to_append(log_file(folder, rank))
            with open(descriptor, "a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(failure.render() + "\n")
    except OSError:  # a full disk, say, which may be what has ended this worker
        folder = None
    if folder is None:
        shown = replace(failure, traceback="") if failure.consequence else failure  # the cause is told elsewhere
        print(shown.render(), file=sys.stderr, flush=True)
    _tell_torchrun(failure)
    return failure.exit_code


def note_error(error: BaseException | None) -> None:
    """Record an error that is on its way out of this worker's main thread, before anything is closed; never raises.

    Memory that ran out is not noted before it is explained (MemoryShortError): what follows depends on that, and it
    leaves the device as it was. Neither is a request to end (Ctrl-C, sys.exit).
    """
    worker = _own()
    if worker is None or not isinstance(error, Exception) or threading.current_thread() != threading.main_thread():
        return
    with contextlib.suppress(Exception):  # a full disk, say: the error itself must go on
        if is_out_of_memory(error):
            return
        failure, first = describe_error(error, worker.rank), not worker.noted
        worker.noted = True
        _tell_torchrun(failure)
        if worker.folder is not None:
            replace(failure, noted=True).write(worker.folder)
        elif first and _is_of_device(error):  # shown twice, rather than never
            print(failure.render(), file=sys.stderr, flush=True)


def note_device_error(error: BaseException) -> None:
    """As `note_error`, where others may survive: only an error after which this process cannot use its device."""
    if _is_of_device(error):
        note_error(error)


def forget_error() -> None:
    """Take back what was noted: this worker goes on, or has come to its end."""
    worker = _own()
    if worker is None or not worker.noted:
        return
    worker.noted = False
    with contextlib.suppress(OSError):
        if worker.folder is not None:
            record_file(worker.folder, worker.rank).unlink(missing_ok=True)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            Path(path).unlink(missing_ok=True)


@final
class Noting:
    """`with Noting():` notes the error that leaves it. The innermost `with`: what is around it closes later."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        note_error(error)


def _is_of_device(error: BaseException) -> bool:
    return type(error).__name__ in DEVICE_ERRORS and any(text in str(error) for text in DEVICE_LOST)


def _own() -> _Worker | None:
    """This process's; none in one that it has forked."""
    worker = _Process.worker
    return worker if worker is not None and worker.pid == os.getpid() else None


def _tell_torchrun(failure: Failure) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": failure.traceback or failure.message, "timestamp": str(int(failure.time))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": failure.message, "extraInfo": extra}}, file)
