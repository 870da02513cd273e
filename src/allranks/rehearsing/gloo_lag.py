"""What gloo's threads still hold is given back before the next operator: a peak that does not depend on who ran when.

A thread of gloo that has ended a collective wakes whoever waits for it, and lets go of the message only when it comes
to run again. On a busy processor that is some operators later: up to a tenth of a small model's peak, in one step and
not in the next.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, final

from torch.utils._python_dispatch import TorchDispatchMode

TASKS = Path("/proc/self/task")
THREADS = ("pt_gloo_runloop", "gloo_tcp_loop")
LIMIT_SECONDS = 1.0  # a thread that runs for longer does not lag, it works
MOST_BYTES = 256  # of what a thread says of itself: name and state stand at its beginning
_RUNNABLE = b"R"
_ENDED = (FileNotFoundError, ProcessLookupError)
"""What reading of a thread raises that has ended, before its file is opened and afterwards: it rests."""


@final
class GlooAtRest(TorchDispatchMode):
    """Inside, no operator begins while a thread of gloo has still to run. Where there is no /proc it never waits.

    Operators of the thread that entered it alone: gloo's own threads inherit the mode with a collective, and one that
    copies the parts of its result would wait for itself. What a collective works on is held until the next operator:
    were gloo's thread the last to let go of it, no profiler would see it go.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = TASKS.iterdir() if TASKS.is_dir() else ()
        self._threads = [task / "stat" for task in found if _name(task / "stat") in THREADS]
        self._stats: list[int] = []
        self._of = 0
        self._held: object = None

    def __enter__(self) -> Self:
        self._of = threading.get_ident()
        # Kept open: all are read before every operator, and a process that has had many groups has hundreds of them.
        self._stats = []
        for thread in self._threads:
            with suppress(*_ENDED):
                self._stats.append(os.open(thread, os.O_RDONLY))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self.wait()
        self._held = None
        for stat in self._stats:
            os.close(stat)
        self._stats = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if threading.get_ident() == self._of:
            self.wait()
            self._held = (args, kwargs) if func.namespace == "c10d" else None
        return func(*args, **(kwargs or {}))

    def wait(self) -> None:
        """Until all of them sleep, at most LIMIT_SECONDS."""
        limit = time.monotonic() + LIMIT_SECONDS
        while any(_state(stat) == _RUNNABLE for stat in self._stats) and time.monotonic() < limit:
            os.sched_yield()


def _name(stat: Path) -> str:
    try:
        return stat.read_text().partition("(")[2].rpartition(")")[0]
    except _ENDED:
        return ""


def _state(stat: int) -> bytes:
    try:
        return os.pread(stat, MOST_BYTES, 0).rpartition(b") ")[2][:1]
    except _ENDED:
        return b""
