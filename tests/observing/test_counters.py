"""The stopwatch splits all of the time and loses none."""

import time

import pytest

from allranks.observing.counters import CAUSES, Stopwatch


def test_the_causes_add_up_to_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 11.0, 14.0, 14.5, 16.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    for cause in ("input", "forward_backward", "input", "agreement"):
        stopwatch.mark(cause)
    totals = stopwatch.totals()
    assert totals == dict.fromkeys(CAUSES, 0.0) | {"input": 1.5, "forward_backward": 3.0, "agreement": 2.0}
    assert sum(totals.values()) == 6.5


def test_a_cause_that_nobody_knows_is_refused() -> None:
    with pytest.raises(KeyError):
        Stopwatch().mark("lunch")  # type: ignore[arg-type]
