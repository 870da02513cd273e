"""When reported failures happened, by one clock."""

import json
from dataclasses import replace

import pytest

from allranks.failure import Failure
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.moments import Moments

HERE = Failure(0, "a", 8, 1000.0, 1, "was killed by SIGABRT", signal="SIGABRT")
THERE = Failure(1, "b", 9, 0.0, 1, "ValueError: x")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [900.0]
    monkeypatch.setattr("allranks.surviving.hosts.moments.time.time", lambda: clock[0])
    return clock


def first(now: list[float], told: float, age: float) -> Failure | None:
    """Of HERE and what came between the looks at 1,002.0 and 1,002.5."""
    moments, report = Moments(), Report(1, replace(THERE, time=told)).posted(told + age)
    reports: list[Report | None] = [Report(1, HERE), None]
    now[0] = 1002.0
    moments.look(lambda: reports)
    reports[1] = Report.from_json(json.loads(json.dumps(report.to_json())))
    now[0] = 1002.5
    moments.look(lambda: reports)
    now[0] = 1010.0
    return moments.first(moments.look(lambda: reports), 0, [])


def test_what_a_clock_says_counts_between_two_looks(now: list[float]) -> None:
    told = first(now, 999.9, 2.3)
    assert told is not None and told.rank == 1 and told.time == 999.9, "clocks agree: a tenth of a second decides"
    told = first(now, 1000.1, 2.3)
    assert told is not None and told.rank == 0
    for wrong in (-7200.0, 7200.0):
        told = first(now, 999.9 + wrong, 2.6)
        assert told is not None and told.rank == 1 and told.time == 999.9 + wrong
        told = first(now, 1000.1 + wrong, 1.9)
        assert told is not None and told.rank == 0


def test_what_this_host_found_is_by_its_clock(now: list[float]) -> None:
    moments = Moments()
    lost = replace(HERE, time=5.0)
    reports = moments.look(lambda: [Report(1, HERE), None])
    assert moments.first(reports, 0, [lost]) is lost
    assert moments.first([None, None], 0, []) is None
