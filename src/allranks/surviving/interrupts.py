"""Requests to stop, as the command sees them: the first is passed on to the workers, the second means now."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, final

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""All but the first read as SIGTERM; SIGUSR1 is what a scheduler can be told to send ahead of its limit."""


@final
class Interrupts:
    """While entered, Ctrl-C, SIGTERM and what reads as that are noted and do not end this process.

    These are SIGUSR1 (a scheduler's warning) and SIGHUP (a closed terminal).

    Attributes:
        first: the first request, as SIGINT or SIGTERM; None: nobody has asked.
        urgent: whether there was a second.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """`on_request` is called after each request, between two of the program's own lines."""
        self.first: signal.Signals | None = None
        self.urgent = False
        self._on_request = on_request
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        with contextlib.suppress(ValueError):  # not the main thread, where Python allows no handlers
            self._replaced = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        else:
            self.urgent = True
        self._on_request()
