"""The memory in which workers show themselves to the agent of their host: one slot each (observing/heartbeat.py)."""

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import final

from allranks.observing.heartbeat import ANSWERED, ASKED, FINISHED, MARK, NUM_FIELDS, SLOT_BYTES, STEP


@final
class SharedBeats:
    """The memory that the workers of one host share with their agent; it ends with the two, however they end."""

    def __init__(self, num_workers: int) -> None:
        self._size = num_workers * SLOT_BYTES
        if hasattr(os, "memfd_create"):
            self._descriptor = os.memfd_create("allranks-heartbeats")  # has no name that could be left behind
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="allranks-")
        os.ftruncate(self._descriptor, self._size)
        self._fields = memoryview(mmap.mmap(self._descriptor, self._size)).cast("q")

    def slot(self, place: int) -> memoryview:
        """The numbers of one worker."""
        return self._fields[place * NUM_FIELDS : (place + 1) * NUM_FIELDS]

    def clear(self) -> None:
        """Before workers are started: nobody has shown anything, from now on."""
        now = time.monotonic_ns()
        for at in range(len(self._fields)):
            self._fields[at] = now if at % NUM_FIELDS == MARK else 0

    def ask(self, *, stacks: bool = False) -> None:
        """Let every worker write down its collectives; with `stacks`, into its log, where all its threads are."""
        for place in range(len(self._fields) // NUM_FIELDS):
            number = abs(self.slot(place)[ASKED]) + 1
            self.slot(place)[ASKED] = -number if stacks else number

    def answered(self, place: int) -> bool:
        """Whether a worker has done so."""
        slot = self.slot(place)
        return slot[ASKED] == slot[ANSWERED]

    def steps(self) -> list[int]:
        """The last step that each worker of this attempt has finished."""
        return [self.slot(place)[STEP] for place in range(len(self._fields) // NUM_FIELDS)]

    def said(self, place: int) -> int | None:
        """The exit code with which a worker has said that its work comes to an end; None: it has not."""
        found = self.slot(place)[FINISHED]
        return found - 1 if found else None

    def has_finished(self, place: int, code: int) -> bool:
        """Whether a worker has said that its work has come to an end with this exit code."""
        return self.said(place) == code

    def close(self) -> None:
        """Let the memory go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if not self.path.startswith("/proc/"):
                Path(self.path).unlink(missing_ok=True)
