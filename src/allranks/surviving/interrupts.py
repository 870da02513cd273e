"""Requests to stop, as the command sees them: the first is passed on to the workers, the second means now."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NoReturn, final

from allranks.failure import StoppedBeforeStart

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""All but the first read as SIGTERM; SIGUSR1 is what a scheduler can be told to send ahead of its limit."""

AGAIN_SECONDS = 0.2  # between two tries to stop; a scheduler's grace is 30 s


@final
class Interrupts:
    """While entered, Ctrl-C, SIGTERM and what reads as that are noted and do not end this process.

    These are SIGUSR1 (a scheduler's warning) and SIGHUP (a closed terminal), unless the command's parent has it ignore
    that (nohup).

    Attributes:
        first: the first request, as SIGINT or SIGTERM; None: nobody has asked.
        urgent: whether there was a second; SIGHUP is none: a closed terminal sends it twice, itself and by its shell.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        """`on_request` is called after each request, between two of the program's own lines."""
        self.first: signal.Signals | None = None
        self.urgent = False
        self._on_request = on_request
        self._replaced: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        """Raises what a request of a moment ago has raised, and somebody's code has swallowed."""
        if _swallowed.asked is not None:
            raise _swallowed.asked()
        with contextlib.suppress(ValueError):  # not the main thread, where Python allows no handlers
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._replaced[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._replaced.items():
            # After the run its exit code stands: what `stopped_before_start` would raise would take its place.
            signal.signal(number, _pass_by if handler in (_stop, _pass_by) else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        elif number != signal.SIGHUP:
            self.urgent = True
        self._on_request()


@final
class _Swallowed:
    """What the last request to stop has raised, for as long as it has not arrived where the command ends."""

    asked: Callable[[], BaseException] | None = None


_swallowed = _Swallowed()


@contextlib.contextmanager
def stopped_before_start() -> Iterator[None]:
    """Inside, what reads as SIGTERM raises StoppedBeforeStart, so that what is under way is cleaned up, as by Ctrl-C.

    Without it each signal ends the process with a code of its own (SIGUSR1: 138). `Interrupts` takes over inside. What
    the caller's parent has ignored (nohup) or somebody else sees to stays as it is.

    Compiled modules clear any exception that they meet while they are imported (torch looks for numpy so), and Python
    code may make an error of its own out of it: so it is raised again until it has arrived here.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        for number in SIGNALS[1:]:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, _stop)
    with _arrives():
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                for number in SIGNALS[1:]:
                    if signal.getsignal(number) in (_stop, _pass_by):  # and nobody's who has come since
                        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def ctrl_c_arrives() -> Iterator[None]:
    """Inside, a Ctrl-C that comes while a module is imported raises KeyboardInterrupt until that has arrived here.

    At any other time it is Python's own, which code may handle. Where somebody else sees to SIGINT nothing changes.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt)
    with _arrives():
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                if signal.getsignal(signal.SIGINT) is _interrupt:
                    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _arrives() -> Iterator[None]:
    """Where a request to stop ends: what was made of it on the way is it again, and it is raised no more."""
    try:
        yield
    except Exception as error:
        if _swallowed.asked is not None:
            raise _swallowed.asked() from error
        raise
    finally:
        _swallowed.asked = None
        with contextlib.suppress(ValueError):
            if signal.getsignal(signal.SIGALRM) is _raise_again:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    _raise_until_it_arrives(partial(StoppedBeforeStart, signal.Signals(number).name))


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _imports(frame):
        raise KeyboardInterrupt
    _raise_until_it_arrives(KeyboardInterrupt)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _raise_until_it_arrives(error: Callable[[], BaseException]) -> NoReturn:
    """Again later, too, where nobody else has an alarm: a program's, or its parent's, is not ours to take."""
    _swallowed.asked = error
    if signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and not signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.signal(signal.SIGALRM, _raise_again)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS, AGAIN_SECONDS)
    raise error()


def _raise_again(number: int, frame: FrameType | None) -> None:
    """Not while what is under way is being cleaned up for the last one."""
    error = sys.exception()
    while error is not None and not isinstance(error, (StoppedBeforeStart, KeyboardInterrupt)):
        error = error.__context__
    if error is None and _swallowed.asked is not None:
        raise _swallowed.asked()


def _pass_by(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which says that the command's parent wants it so."""
