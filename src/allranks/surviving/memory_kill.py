"""Who sent SIGKILL: the kernel counts what it ends for want of memory, for each container and for the machine.

Sources: memory.events (cgroup v2), memory.oom_control (cgroup v1), /proc/vmstat; Documentation/admin-guide of Linux.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from allranks.failure import Failure

SYSTEM = Path("/proc/vmstat")
MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
REMEDY = "lower train.micro_batch or data.workers, shard more, or give it more memory"

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_memory_kills() -> dict[str, int]:
    """File -> how many processes the kernel has ended for want of memory: in this container, on this machine."""
    found = {}
    for path in (*_own_counters(), SYSTEM):
        try:
            match = _COUNT.search(path.read_text(encoding="utf-8"))
        except OSError:
            continue
        if match is not None:
            found[str(path)] = int(match[1])
    return found


def _own_counters() -> list[Path]:
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, folder = line.split(":", 2)
        below = folder.lstrip("/")
        if not controllers:
            found.append(MOUNT / below / "memory.events")
        elif "memory" in controllers.split(","):
            found += [MOUNT / "memory" / below / "memory.oom_control", MOUNT / "memory" / "memory.oom_control"]
    return list(dict.fromkeys(found))


def decode_kill(failure: Failure, before: Mapping[str, int], after: Mapping[str, int]) -> Failure:
    """The failure of a worker that SIGKILL ended, with what the kernel's counts before and after say."""
    if failure.signal != "SIGKILL" or not after:
        return failure
    risen = [path for path, count in after.items() if count > before.get(path, 0)]
    if not risen:
        words = "by somebody's kill -9: the kernel has ended nothing for want of memory"
    else:
        path = risen[0]
        whose = "" if path != str(SYSTEM) else " (or another process of this machine was)"
        counts = f"oom_kill in {path} rose from {before.get(path, 0)} to {after[path]}"
        words = f"by the kernel for want of memory{whose}: {counts}; {REMEDY}"
    return replace(failure, message=f"was killed by SIGKILL {words}")
