"""What the fork server imports before it forks: everything that a worker imports on the way to its first step.

The server imports this module by name; where ALLRANKS_PRELOAD says what to import, importing it does the work and keeps
a Report, which every forked process inherits. Nothing here may raise: that would end the server.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

from allranks.process_end import freeze
from allranks.surviving.interrupts import SIGNALS

VARIABLE = "ALLRANKS_PRELOAD"
CUDA_DRIVER_FILE = "/dev/nvidia-uvm"  # opened by cuInit, but not by NVML, through which torch counts devices


@final
@dataclass(frozen=True, slots=True)
class Report:
    """The fork server after its imports.

    Attributes:
        pid: the server's.
        seconds: how long it imported.
        threads: how many threads it has; a fork keeps one, and the locks of the others for ever.
        cuda: whether CUDA was initialised, which no forked process can use.
        failure: why something could not be imported, in one line, or "".
    """

    pid: int
    seconds: float
    threads: int
    cuda: bool
    failure: str

    def hindrance(self) -> str | None:
        """Why processes forked from this server would not be sound, or None."""
        if self.failure:
            return f"the preload failed: {self.failure}"
        if self.cuda:
            return "the imports initialised CUDA, which does not survive a fork"
        if self.threads != 1:
            return f"the imports left {self.threads} threads, whose locks do not survive a fork"
        return None


def preload(wanted: str) -> Report:
    """Import what the JSON text `wanted` names, for the processes to be forked from this one; never raises."""
    began = time.monotonic()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # requests are the command's; workers inherit the mask
    failure = ""
    try:
        _import_all(json.loads(wanted))
    except BaseException as error:  # a user's module may end in SystemExit
        failure = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(":")
    freeze()  # what is imported now stays shared between the workers, and out of their collections
    return Report(os.getpid(), time.monotonic() - began, num_threads(), cuda_is_initialised(), failure)


def _import_all(wanted: dict[str, object]) -> None:
    modules, paths, task = wanted["modules"], wanted["sys_path"], wanted["task"]
    assert isinstance(modules, list) and isinstance(paths, list)
    sys.path[:] = paths
    for name in modules:
        importlib.import_module(name)
    if isinstance(task, str):
        from allranks.task_loading import TaskSpec, load_module

        load_module(TaskSpec.parse(task))


def num_threads() -> int:
    """Threads of this process, those of compiled libraries included where the system tells."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def cuda_is_initialised() -> bool:
    """Whether anything in this process has initialised CUDA, through torch or not."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    with contextlib.suppress(OSError):
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry) == CUDA_DRIVER_FILE:
                    return True
    return False


def send_report(reply: Connection) -> None:
    """Run in a process forked from the server: tell the command how the server is."""
    reply.send_bytes(json.dumps(None if REPORT is None else asdict(REPORT)).encode())


def _preload_if_asked() -> Report | None:
    wanted = os.environ.pop(VARIABLE, None)
    if wanted is None:
        return None
    from allranks.lifeline import die_with_parent

    die_with_parent(json.loads(wanted)["parent"])
    return preload(wanted)


REPORT = _preload_if_asked()
