"""What the kernel tells of a process: how it is, what it waits for, who holds it, whether it gets a core or is frozen.

Sources: /proc/PID/stat, status, task, wchan, schedstat and cgroup of Linux (Documentation/filesystems/proc.rst,
scheduler/sched-stats.rst), cgroup.events (cgroup v2), freezer.state (cgroup v1; Documentation/admin-guide).
"""

from pathlib import Path

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
STOPPED = ("T", "t")  # by a signal; by a debugger
FROZEN = "T"
ENDED = "Z"  # its main thread; others may still give its memory back


def process_state(pid: int) -> str:
    """The kernel's letter for the state of a process, as in ps; "" where it cannot be known."""
    try:
        return (PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_held_dead(pid: int) -> bool:
    """Whether a process has ended to its last thread, and its parent is not told because a debugger holds it (ptrace).

    Its memory and its files are given back by then.
    """
    states = _lines(PROCESSES / str(pid) / "status")
    held = any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in states)
    try:
        threads = [int(one.name) for one in (PROCESSES / str(pid) / "task").iterdir()]
    except OSError:
        return False
    return held and all(process_state(thread) == ENDED for thread in threads)


def waits_in(pid: int) -> str:
    """The kernel's function in which a process waits; "" where it does not wait or it cannot be known."""
    try:
        found = (PROCESSES / str(pid) / "wchan").read_text().strip()
    except OSError:
        return ""
    return "" if found == "0" else found


def core_seconds(pid: int) -> tuple[float, float] | None:
    """How long the main thread of a process has run, and has waited for a core; None where the system does not tell."""
    try:
        ran, waited, *_ = (PROCESSES / str(pid) / "schedstat").read_text().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):
        return None


def is_frozen(pid: int) -> bool:
    """Whether the control group of a process is frozen (a paused container); its state alone shows S or D then."""
    try:
        lines = (PROCESSES / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, folder = line.split(":", 2)
        below = folder.lstrip("/")
        if not controllers and "frozen 1" in _lines(GROUPS / below / "cgroup.events"):
            return True
        if "freezer" in controllers.split(",") and "FROZEN" in _lines(GROUPS / "freezer" / below / "freezer.state"):
            return True
    return False


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
