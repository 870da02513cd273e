"""Requests to stop, as the command sees them: the first is passed on to the workers, the second means now."""

import contextlib
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, final

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Interrupts:
    """While entered, Ctrl-C, SIGTERM and SIGHUP (a closed terminal; as SIGTERM) are noted and do not end this process.

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
