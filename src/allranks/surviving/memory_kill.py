"""Who sent SIGKILL: the kernel counts what it ends for want of memory, for each container and for the machine.

A count that rose tells of some process of the container, and only in these seconds of this one. What a service of the
system ends before the kernel has to (systemd-oomd, a kubelet) is not counted.

Sources: memory.events (cgroup v2), memory.oom_control (cgroup v1), /proc/vmstat; Documentation/admin-guide of Linux.
"""

import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

from allranks.failure import Failure
from allranks.free_memory import group_limit_bytes
from allranks.units import format_bytes

SYSTEM = Path("/proc/vmstat")
MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
REMEDY = "lower train.micro_batch or data.workers, shard more, or give it more memory"

RECENT_SECONDS = 10.0

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@final
class RecentKills:
    """The counts as they stood a little while ago, so that what was ended earlier is not taken for what ends now."""

    def __init__(self) -> None:
        self._seen = deque([(time.monotonic(), count_memory_kills())])

    def look(self) -> None:
        """While all workers live: see where the counts stand."""
        now = time.monotonic()
        if now - self._seen[-1][0] < RECENT_SECONDS / 2:
            return
        self._seen.append((now, count_memory_kills()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= RECENT_SECONDS:
            self._seen.popleft()

    def decode(self, failure: Failure) -> Failure:
        """The failure of a worker that has ended now, as `decode_kill` reads it."""
        seconds, before = time.monotonic() - self._seen[0][0], self._seen[0][1]
        return decode_kill(failure, before, count_memory_kills(), seconds, limit=group_limit_bytes())


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


def decode_kill(
    failure: Failure,
    before: Mapping[str, int],
    after: Mapping[str, int],
    seconds: float = RECENT_SECONDS,
    *,
    limit: int | None = None,
) -> Failure:
    """The failure of a worker that SIGKILL ended, with what the kernel's counts before and after say.

    Args:
        seconds: between the two.
        limit: bytes that the processes of this container may take together; None: none is known.
    """
    if failure.signal != "SIGKILL" or not after:
        return failure
    risen = [path for path, count in after.items() if count > before.get(path, 0)]
    if not risen:
        words = (
            "and the kernel counts nothing that it ended for want of memory: by somebody's kill -9, a scheduler, or a "
            "service that frees memory (systemd-oomd, a kubelet; its log tells)"
        )
    else:
        path = risen[0]
        whose = "" if path != str(SYSTEM) else " (or another process of this machine was)"
        counts = f"oom_kill in {path} rose from {before.get(path, 0)} to {after[path]} in the last {seconds:.0f} s"
        if limit is not None and path != str(SYSTEM):
            counts += f", and its processes may take {format_bytes(limit)} together"
        words = f"most likely by the kernel for want of memory{whose}: {counts}; {REMEDY}"
    return replace(failure, message=f"was killed by SIGKILL, {words}")
