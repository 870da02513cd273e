"""What an orderly end of this process would wait for without end: then it ends without destructors (end_process)."""

import multiprocessing.process
import threading
from multiprocessing.process import BaseProcess

CALL = "allranks-meeting"  # names the thread of a call to another host, which may never be answered
_killed: list[BaseProcess] = []


def forsake(process: BaseProcess) -> None:
    """Wait for this killed process no more, at the end of this one either."""
    _killed.append(process)
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]  # joined at the interpreter's end


def hinders_the_end() -> bool:
    """Whether a call to another host still waits, or a worker still has not died of SIGKILL."""
    calls = any(thread.name == CALL for thread in threading.enumerate())
    return calls or any(process.exitcode is None for process in _killed)
