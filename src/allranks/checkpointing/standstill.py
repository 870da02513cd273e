"""A call that may stand still for ever, such as one to another machine, and how long it may. No torch."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

from allranks.units import format_seconds

LOOK_SECONDS = 0.25

Result = TypeVar("Result")


@final
class _Way:
    """What a thread of its own does, and what became of it."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.given_up = False
        self.num_moves = 0
        self.result: Any = None
        self.error: BaseException | None = None

    def go(self, call: Callable[[Callable[[], None]], Any]) -> None:
        """Do it."""
        try:
            self.result = call(self._move)
        except BaseException as error:  # whatever it is, whoever waits raises it
            self.error = error
        finally:
            self.ended.set()

    def _move(self) -> None:
        if self.given_up:
            raise TimeoutError("it was given up")
        self.num_moves += 1


def unless_still(seconds: float, call: Callable[[Callable[[], None]], Result]) -> Result:
    """What `call` returns. Where it comes no further for so long it is left to itself, and its thread ends with the
    process.

    A time in which this process does not run counts for nothing.

    Args:
        call: given what it calls whenever it has come further; that raises once the call was given up, so that what
            comes to life again changes nothing.

    Raises:
        TimeoutError: it stood still; and what `call` raises.
    """
    way = _Way()
    threading.Thread(target=way.go, args=(call,), name="allranks-elsewhere", daemon=True).start()
    stood, moves = 0.0, 0
    while not way.ended.wait(min(LOOK_SECONDS, seconds)):
        stood = stood + min(LOOK_SECONDS, seconds) if way.num_moves == moves else 0.0
        moves = way.num_moves
        if stood >= seconds:
            way.given_up = True
            raise TimeoutError(f"nothing has come further there for {format_seconds(seconds)}")
    if way.error is not None:
        raise way.error
    result: Result = way.result
    return result
