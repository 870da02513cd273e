"""A process that does not outlive its parent: the system kills it when the parent ends, however that ends.

On Linux the kernel does it (prctl's PR_SET_PDEATHSIG), so that it works in a process that hangs or holds Python's lock;
elsewhere a thread looks twice a second. The kernel's promise belongs to the thread that started this process: call this
only where that thread lives as long as the parent does, as the main thread does.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
POLL_SECONDS = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Let this process be killed (SIGKILL) when its parent, `parent_pid`, ends; at once if it already has ended."""
    if sys.platform == "linux":
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            _watch(parent_pid)
    else:
        _watch(parent_pid)
    if os.getppid() != parent_pid:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent_pid: int) -> None:
    threading.Thread(target=_poll, args=(parent_pid,), name="allranks-lifeline", daemon=True).start()


def _poll(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
