"""What stands still is given up; what goes on, however slowly, is not."""

import threading
from collections.abc import Callable

import pytest

from allranks.checkpointing import standstill
from allranks.checkpointing.standstill import unless_still


def test_what_goes_on_may_take_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "LOOK_SECONDS", 0.01)

    def slowly(move: Callable[[], None]) -> str:
        for _ in range(20):
            threading.Event().wait(0.1)
            move()
        return "done"

    assert unless_still(1.0, slowly) == "done", "longer in all than it may stand still"


def test_what_stands_still_is_given_up_and_does_nothing_any_more() -> None:
    go_on, done, told = threading.Event(), threading.Event(), list[str]()

    def stand(move: Callable[[], None]) -> None:
        try:
            go_on.wait(60)
            move()
            told.append("it went on")
        except TimeoutError as error:
            told.append(str(error))
        finally:
            done.set()

    with pytest.raises(TimeoutError, match=r"nothing has come further there for 500\.0 ms"):
        unless_still(0.5, stand)
    go_on.set()
    assert done.wait(60) and told == ["it was given up"]


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), KeyboardInterrupt()])
def test_what_it_raises_is_raised(error: BaseException) -> None:
    def refuse(move: Callable[[], None]) -> None:
        raise error

    with pytest.raises(type(error)):
        unless_still(60.0, refuse)
