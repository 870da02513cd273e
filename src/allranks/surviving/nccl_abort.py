"""Why NCCL's watchdog has ended a worker by SIGABRT: its last words stand in the rank's log.

It ends a process whose collective has waited too long, whose peer has gone, whose device has failed, or which it could
not look at; by itself such an end looks like a crash in compiled code. Source of the words: ProcessGroupNCCL.cpp of
torch 2.11 and 2.13. None of it has been seen on several GPUs here.
"""

import re
import signal
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import final

from allranks.failure import PEER_LOST, RAISED, TRANSIENT, Failure, log_file
from allranks.ordinary_file import read_ordinary
from allranks.surviving.outcome import Ended

LAST_BYTES = 1 << 18  # a stack of C++ follows the words, for each group of processes

_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: (?P<work>WorkNCCL\(.*?\)) ran for (?P<milliseconds>\d+)"
)
_EXCEPTION = re.compile(r"watchdog thread terminated with exception: (?P<what>[^\n]+)")
_TOLD = re.compile(r"Terminating the process after attempting to dump debug info, due to (?P<what>[^\n]+?)\.?(\n|$)")
_STUCK = re.compile(r"watchdog got stuck for (?P<seconds>\d+) seconds")


@final
class NcclAborts:
    """The last words of workers of this host, each since it began."""

    def __init__(self, logs: Path, ranks: Iterable[int] = ()) -> None:
        """`ranks` are about to start, and print to their logs in this folder."""
        paths = {rank: log_file(logs, rank) for rank in ranks}
        self._began = {rank: (path, _size(path)) for rank, path in paths.items()}

    def decode(self, ended: Iterable[Ended]) -> list[Failure]:
        """The failures of those that the watchdog has ended.

        Rank 0 keeps the terminal: what compiled code prints there is in no log. Where the watchdog has ended another
        rank, an abort that nothing explains is taken for its doing, too.
        """
        aborted = [one for one in ended if one.code == -signal.SIGABRT]
        told = {one.rank: self._read(one) for one in aborted}
        if not any(told.values()):
            return []
        unexplained = "was ended by SIGABRT, as other ranks were by NCCL's watchdog"
        return [told[one.rank] or _failure(one, unexplained, TRANSIENT, consequence=True) for one in aborted]

    def _read(self, ended: Ended) -> Failure | None:
        if ended.rank not in self._began:
            return None
        path, began = self._began[ended.rank]
        try:
            said = read_ordinary(path, min(LAST_BYTES, max(0, _size(path) - began))).decode(errors="replace")
        except OSError:
            return None
        if (found := _TIMEOUT.search(said)) is not None:
            seconds = int(found["milliseconds"]) // 1000
            what = f"was ended by NCCL's watchdog: {found['work']} waited in vain for {seconds} s"
            return _failure(ended, what, TRANSIENT, consequence=True)
        if (found := _EXCEPTION.search(said)) is not None:
            what = f"was ended by NCCL's watchdog: {found['what'].strip()}"
            lost = any(text in said[found.start() :] for text in PEER_LOST)
            return _failure(ended, what, TRANSIENT if lost else RAISED, consequence=lost)
        if (found := _STUCK.search(said)) is not None:
            what = f"ended by NCCL's monitor: for {found['seconds']} s Python's lock was held, or CUDA hung"
            return _failure(ended, what, TRANSIENT)
        if (found := _TOLD.search(said)) is not None:
            # The monitor's, where another rank's watchdog has left its word in the store.
            return _failure(ended, f"ended by NCCL's monitor: {found['what']}", TRANSIENT, consequence=True)
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _failure(ended: Ended, message: str, exit_code: int, *, consequence: bool = False) -> Failure:
    where = (ended.rank, socket.gethostname(), ended.pid, ended.when)
    return Failure(*where, exit_code, message, signal="SIGABRT", consequence=consequence)
