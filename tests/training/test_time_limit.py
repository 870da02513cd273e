"""The run's own limit of time: when a rank says that it is reached, and why."""

import os
import subprocess
import sys
import time

import pytest

from allranks.training.time_limit import TimeLimit, started_at


class Clock:
    """`time.monotonic` by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 0.0) -> None:
        self.now = now
        monkeypatch.setattr("allranks.training.time_limit.time.monotonic", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def looks(clock: Clock, limit: TimeLimit, *seconds: float) -> list[bool]:
    """What is said after each of these pauses."""
    said = []
    for pause in seconds:
        clock.pass_by(pause)
        said.append(limit.is_reached())
    return said


def test_it_is_reached_when_a_later_boundary_would_be_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1000.0)
    limit = TimeLimit(100.0, 1000.0, 0, lambda: 5.0)
    # Looks at 10 and 15; then steps of 10 s: the next look, the rest of its step, and a save take up to 25.
    assert looks(clock, limit, 10, 5, 10, 10, 10, 10, 10, 9, 1) == [False] * 8 + [True]
    assert str(limit.explain(7)) == (
        "the run stops after step 7, saves and ends with 75, because 75 s of train.max_seconds=100 have passed; "
        "a step took up to 10 s, the last save 5 s"
    )


def test_where_agreements_are_read_a_step_later_one_more_step_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit(100.0, 0.0, 1, lambda: 0.0)
    assert looks(clock, limit, 10, 10, 10, 10, 10, 10, 9, 1) == [False] * 7 + [True]


def test_a_first_step_that_compiles_is_no_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = TimeLimit(100.0, 0.0, 0, lambda: 0.0)
    assert looks(clock, limit, 1, 60, 5, 5) == [False] * 4
    assert "a step took up to 5 s, no save was timed" in str(limit.explain(3))


def test_what_was_over_before_the_first_step_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 101.0)
    limit = TimeLimit(100.0, 0.0, 0, lambda: 0.0)
    assert limit.is_reached() and "no step was timed" in str(limit.explain(0))


def test_without_a_limit_nothing_is_reached() -> None:
    assert not TimeLimit(None, None, 0, lambda: 1e9).is_reached()


def test_without_a_command_the_process_counts_from_its_own_start() -> None:
    code = "import time; time.sleep(0.3); from allranks.training.time_limit import started_at; print(started_at())"
    before = time.monotonic()
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert before - 1.1 < float(found.stdout) < time.monotonic() - 0.3
    assert TimeLimit(time.monotonic() - started_at() - 0.5, None, 0, lambda: 0.0).is_reached()
    assert not TimeLimit(time.monotonic() - started_at() + 60, None, 0, lambda: 0.0).is_reached()
