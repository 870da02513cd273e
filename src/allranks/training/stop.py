"""Requests to stop, as a worker sees them: noted at once, acted upon at the next step boundary, by all ranks together.

A signal never interrupts a step: its handler only writes down that it came. The trainer asks `seen()` before each step,
the ranks agree (law 11), save, and end with 130 (Ctrl-C) or 75 (SIGTERM, and what is read as that: SIGUSR1, which
schedulers can be told to send ahead of their limit, and SIGHUP, a closed terminal, unless the parent has it ignored).
"""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, final

from allranks.failure import INTERRUPTED, TRANSIENT

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@final
class StopRequests:
    """The requests of this process since `install`; a context manager that puts the old handlers back.

    Ctrl-C reaches a worker twice, from the terminal and from its agent; so a second one is not counted here. The agent
    counts, and kills. A process `alone` has no agent: there the second request ends it at once, without saving. SIGHUP
    is never the second: a terminal that is closed sends it twice, itself and by its shell.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._pid = os.getpid()
        self._seen: list[int] = []
        self._replaced: dict[int, Any] = {}

    @classmethod
    def install(cls, *, alone: bool = False) -> "StopRequests":
        """Take over SIGNALS; does nothing outside the main thread, where Python allows no handlers."""
        requests = cls(alone=alone)
        try:
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                    requests._replaced[number] = signal.signal(number, requests._note)
        except ValueError:
            return requests
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the agent starts workers with SIGINT held back
        return requests

    def seen(self) -> tuple[bool, bool]:
        """(Ctrl-C, terminate): which of the two has been asked for so far."""
        return signal.SIGINT in self._seen, any(number != signal.SIGINT for number in self._seen)

    def requested(self) -> str | None:
        """The name of the first request's signal, or None."""
        return signal.Signals(self._seen[0]).name if self._seen else None

    def restore(self) -> None:
        """Put the handlers back that `install` replaced."""
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        self._replaced = {}

    def __enter__(self) -> "StopRequests":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        second = bool(self._seen) and number != signal.SIGHUP
        if self._alone and second and os.getpid() == self._pid:  # a forked child only notes
            self._end_now(number)
        self._seen.append(number)

    def _end_now(self, number: int) -> None:
        name = signal.Signals(number).name
        print(f"second request to stop ({name}): ended without saving", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED if number == signal.SIGINT else TRANSIENT)
