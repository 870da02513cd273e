"""What a test may leave behind: nothing. Environment, child processes and tree are compared before and after."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

GRACE_SECONDS = 3.0  # workers have 2 s to follow their parent
PR_SET_CHILD_SUBREAPER = 36

# Set at import by a library (scikit-learn, threadpoolctl, torch), not by a test.
SET_BY_LIBRARIES = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}

CACHES = {
    ".git",
    ".venv",
    ".cache",
    ".full",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    "__pycache__",
    "site",
}

# Someone may be writing these while the tests run; one that a test writes shows in `git status`.
SOURCE_FOLDERS = {"src", "tests", "docs", "examples", "bench", "tools"}
SOURCE_SUFFIXES = {".py", ".md", ".toml", ".svg", ".html", ".css", ".js", ".txt", ".golden"}


def environment_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What differs between two environments, one line a variable."""
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    ours = [name for name in names if name not in SET_BY_LIBRARIES and not name.startswith("PYTEST_")]
    return [f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in ours]


def adopt_orphans() -> None:
    """Make grandchildren whose parent dies children of this process, so that they are seen; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def living_children() -> set[int]:
    """The process ids of this process's children; ended ones that nobody waits for are waited for here."""
    return {child.pid for child in psutil.Process().children() if not is_ended(child)}


def is_ended(child: psutil.Process) -> bool:
    """Whether a child has ended: a zombie is reaped, as the init process would."""
    try:
        if child.status() != psutil.STATUS_ZOMBIE:
            return False
        os.waitpid(child.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
    return True


def multiprocessing_pids() -> set[int]:
    """The two processes that Python's multiprocessing keeps for as long as the interpreter lives."""
    pids = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    return {pid for pid in pids if pid is not None}


def leftover_children(before: set[int], allowed: Callable[[], set[int]]) -> list[str]:
    """Children that were not there before and do not end within the grace: killed, and named by pid and command."""
    deadline = time.monotonic() + GRACE_SECONDS
    while left := living_children() - before - allowed() - multiprocessing_pids():
        if time.monotonic() > deadline:
            return [end(pid) for pid in sorted(left)]
        time.sleep(0.02)
    return []


def end(pid: int) -> str:
    """Kill a child; its pid and command line."""
    try:
        process = psutil.Process(pid)
        command = " ".join(process.cmdline())
        process.kill()
        process.wait(GRACE_SECONDS)
    except psutil.NoSuchProcess:
        return f"{pid} (ended meanwhile)"
    return f"{pid}: {command}"


def list_tree(root: Path) -> set[str]:
    """Every file under root, caches aside, as relative paths; a new empty folder at the top counts as well."""
    found = {entry.name for entry in root.iterdir() if entry.name not in CACHES}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in CACHES]
        found |= {os.path.relpath(os.path.join(folder, name), root) for name in files}
    return found


def leftover_files(before: set[str], after: set[str]) -> list[str]:
    """The new paths that a test must have left, sorted."""
    return sorted(path for path in after - before if not is_source(path))


def is_source(path: str) -> bool:
    """Whether a path is one that a person writes."""
    return Path(path).parts[0] in SOURCE_FOLDERS and Path(path).suffix in SOURCE_SUFFIXES
