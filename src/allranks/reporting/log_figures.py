"""What a log's own numbers and this host's add to what its signatures tell: workers, memory, who failed again.

This host is where the log is read. It is mostly the one that wrote it, and the lines say whose the figures are.
"""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import final

from allranks.free_memory import whole_host_bytes
from allranks.reporting.signatures import SIGNATURES
from allranks.units import format_bytes

SHARED_MEMORY = Path("/dev/shm")
MUCH_IN_PIECES = 0.1

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_LOCAL_RANK = re.compile(r"local_rank: (\d{1,5})\b")
_FIELD = re.compile(r"^\s*(host|rank|exitcode)\s*: (\S+)")
_ROOT_CAUSE = "Root Cause (first observed failure)"
_AGAIN = "will restart worker group"
_KILLED = re.compile(r"Killed process \d+ .*\banon-rss:(\d+)kB")
_RANK = re.compile(r"\[(?:[Rr]ank|default) ?(\d{1,7})\]|\brank (\d{1,7}) on ")
_XID = re.compile(r"(?:\[ *(?P<second>\d+)\.\d+\].*)?NVRM: Xid \((?P<device>[^)]+)\)(?:: \d+, pid='?(?P<process>\d+))?")
_FAULTED = next(one.regex for one in SIGNATURES if one.name == "E29")


@final
class LogFigures:
    """Collects them from one log on the way, or from several in turn."""

    def __init__(self) -> None:
        self._num_local = 0
        self._killed_bytes = 0
        self._first: dict[str, str] = {}
        self._in_root_cause = False
        self._start = 0
        self._faulted: dict[str, set[object]] = {}

    def passing(self, lines: Iterable[str]) -> Iterator[str]:
        """The same lines, read on their way: those of one log."""
        self._in_root_cause = False
        for line in lines:
            self.read(line)
            yield line

    def next_start(self) -> None:
        """What comes now is of another start of the workers."""
        self._start += 1

    def tell(self, name: str) -> list[str]:
        """Lines of evidence for the signature of that name; [] where there is nothing to add."""
        if name == "E4":
            return [tell_memory(self._num_local, self._killed_bytes, "the kernel's line here")]
        if name == "E5":
            return tell_shared_memory()
        if name == "E8" and "rank" in self._first:
            ended = self._first.get("exitcode")
            code = "" if ended is None else f", exit code {ended}"
            return [f"torchrun saw first: rank {self._first['rank']} on {self._first.get('host', 'a host')}{code}"]
        if name == "E29":
            return tell_again(self._faulted)
        return []

    def read(self, line: str) -> None:
        """One line."""
        if (found := _LOCAL_RANK.search(line)) is not None:
            self._num_local = max(self._num_local, int(found[1]) + 1)
        if (found := _KILLED.search(line)) is not None:
            self._killed_bytes = max(self._killed_bytes, 1024 * int(found[1]))
        if _ROOT_CAUSE in line:
            self._in_root_cause = True
        if self._in_root_cause and (found := _FIELD.search(line)) is not None:
            self._first.setdefault(found[1], found[2])
            self._in_root_cause = found[1] != "exitcode"  # the last field of the block that is kept
        if _AGAIN in line:
            self.next_start()
        if _FAULTED.search(line) is not None:
            device, rank = _XID.search(line), _RANK.search(line)
            if rank is not None:
                self._faulted.setdefault(f"rank {rank[1] or rank[2]}", set()).add(self._start)
            elif device is not None:
                # The kernel's log has no starts, and several lines of one fault: of one process, or of one minute.
                minute = None if device["second"] is None else int(device["second"]) // 60
                which = device["process"] or minute
                self._faulted.setdefault(f"the GPU at {device['device']}", set()).add(which)


def tell_memory(num_workers: int, worker_bytes: int, source: str) -> str:
    """What workers of one host need against what it has; 0: nobody knows.

    Args:
        worker_bytes: the largest resident set that `source` tells.
    """
    whole = whole_host_bytes()
    host = f"{socket.gethostname()}, where this is read, has {format_bytes(whole)} (a container's limit counts)"
    workers = f"{num_workers} workers of a host" if num_workers > 1 else "one worker"
    if num_workers and worker_bytes:
        needs = num_workers * worker_bytes
        over = "more than there is" if needs > whole else f"{needs / whole:.0%} of it"
        each = f"{format_bytes(worker_bytes)} ({source})"
        return f"{workers} x {each} = {format_bytes(needs)}; {host}: {over}"
    if worker_bytes:
        return f"a worker had {format_bytes(worker_bytes)} ({source}); {host}"
    if num_workers:
        return f"{host}: with {workers}, as this log has at least, {format_bytes(whole / num_workers)} each"
    return host


def tell_shared_memory() -> list[str]:
    """How large /dev/shm of this host is; [] where there is none."""
    try:
        place = os.statvfs(SHARED_MEMORY)
    except OSError:
        return []
    size, free = place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize
    name = socket.gethostname()
    return [f"/dev/shm of {name}, where this is read: {format_bytes(size)}, {format_bytes(free)} of it free now"]


def tell_again(faulted: Mapping[str, Iterable[object]]) -> list[str]:
    """Whose GPU faulted in how many starts: the same one twice is the mark of hardware."""
    counts = {who: len(set(starts)) for who, starts in faulted.items()}
    twice = [f"{who} faulted {count} times" for who, count in sorted(counts.items()) if count > 1]
    if twice:
        return [f"{'; '.join(twice)}: the same one again, so suspect its hardware"]
    if len(counts) > 1:
        return [f"{', '.join(sorted(counts))} faulted once each: rather a kernel than one GPU's hardware"]
    return [f"{who} faulted once, as far as this tells" for who in counts]


def describe_pieces(in_use: str, in_pieces: str) -> tuple[str, str] | None:
    """What is wrong and what to do, by the share of its memory that torch holds in pieces; None where words say none.

    Args:
        in_use, in_pieces: as torch prints them, e.g. "9.50 GiB".
    """
    used, pieces = _bytes(in_use), _bytes(in_pieces)
    if used is None or pieces is None or used + pieces <= 0:
        return None
    share = pieces / (used + pieces)
    what = f"the GPU's memory is full: {share:.0%} of what torch holds ({in_pieces} beside {in_use}) is in pieces"
    move = "lower train.micro_batch, recompute activations (layout.recompute) or shard more; pieces are not the cause"
    if share > MUCH_IN_PIECES:
        move = "set PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF) first"
    return what, move


def _bytes(text: str) -> float | None:
    value, _, unit = text.partition(" ")
    try:
        return float(value) * _UNITS[unit]
    except (ValueError, KeyError):
        return None
