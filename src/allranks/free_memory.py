"""How much memory there is, and how much may still be taken, by itself or as what looks like a directory. No torch.

A container's limit counts such files as memory, and the kernel ends a process where it is passed: so the room that the
file system tells is not enough. What was only read from files can be read again, and counts as free.

Sources: memory.max, memory.current, memory.stat (cgroup v2: Documentation/admin-guide/cgroup-v2.rst of Linux);
memory.limit_in_bytes, memory.usage_in_bytes, memory.stat (v1: Documentation/admin-guide/cgroup-v1/memory.rst).
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOUNT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """How one version of control groups names it: limit, use, and what of that was read from files; all in bytes."""

    limit: str
    used: str
    from_files: tuple[str, ...]


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file"))


@dataclass(frozen=True, slots=True)
class _Group:
    """One that limits: to `limit` bytes."""

    folder: Path
    version: _Version
    limit: int

    def left(self) -> int:
        """Bytes that it may still take. Raises OSError, ValueError or KeyError where its files do not say."""
        used = int((self.folder / self.version.used).read_text())
        counts = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return max(0, self.limit - used + sum(int(counts[name]) for name in self.version.from_files))


def free_host_bytes() -> int:
    """What may still be taken of this host's memory, and of its container's."""
    return min([psutil.virtual_memory().available, *_left_to_groups()])


def whole_host_bytes() -> int:
    """What this host has in all, or its container where that may take less."""
    return min([psutil.virtual_memory().total, *(group.limit for group in _groups())])


def group_limit_bytes() -> int | None:
    """What the tightest control group of this process may take; None: none takes less than the host has."""
    limit = min((group.limit for group in _groups()), default=None)
    return limit if limit is not None and limit < psutil.virtual_memory().total else None


def free_bytes(directory: Path) -> int:
    """What may still be written there without taking memory that this host, or this container, has not."""
    place = os.statvfs(directory)
    return min(place.f_bavail * place.f_frsize, free_host_bytes())


def _left_to_groups() -> list[int]:
    """What the control groups that limit this process may still take, in bytes."""
    found = []
    for group in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append(group.left())
    return found


def _groups() -> list[_Group]:
    """The control groups that limit this process."""
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, below = line.split(":", 2)
        if not controllers:
            found += _along(_MOUNT, below, _V2)
        elif "memory" in controllers.split(","):
            found += _along(_MOUNT / "memory", below, _V1)
    return found


def _along(mount: Path, below: str, version: _Version) -> list[_Group]:
    """Those from `below` up to `mount`: in a container the inner ones may not be seen under their names."""
    folder, found = mount / below.lstrip("/"), []
    for group in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            found.append(_Group(group, version, int((group / version.limit).read_text())))
        if group == mount:
            break
    return found
