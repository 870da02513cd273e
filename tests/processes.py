"""Waiting for processes and files in tests, with a limit."""

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return as soon as the condition holds; AssertionError when it has not within the limit."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
