"""A call that does not return keeps nobody."""

import threading

import pytest

from allranks.surviving.unanswered import within


def test_who_answers_in_time_is_heard_and_nobody_else() -> None:
    never = threading.Event()
    assert within(60.0, lambda: 3, 0) == 3
    assert within(0.05, lambda: never.wait() or 3, 0) == 0
    never.set()


def test_its_error_is_the_callers() -> None:
    def fail() -> int:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        within(60.0, fail, 0)


def test_where_no_thread_may_be_started_it_is_called_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert within(60.0, lambda: 3, 0) == 3
