"""What is told of a bad way to another host; tests/cli/test_running_on_a_network.py has real ones."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.observing.links import Connection, links_file
from allranks.surviving.bad_link import LEAST_BYTES, LOOK_SECONDS, WINDOW_SECONDS, BadLink, Traffic, find_bad, sum_up
from allranks.verdict import Verdict
from tests.surviving.rows import row

HERE, THERE, OTHER = "10.0.0.1", "10.0.0.2", "10.0.0.3"
MB = 1_000_000


class Worker:
    """A rank whose connections' counters a test moves."""

    def __init__(self, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logs, self.watch = logs, BadLink(logs)
        self.now = time.monotonic()
        self.connections = {THERE: Connection(HERE, 1, THERE, 2, 5 * MB, 4000, 3000, 0, 0, 300, 1000 * MB)}
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def move(self, there: str = THERE, **by: int) -> None:
        one = self.connections[there]
        round_trip = by.pop("round_trip", one.round_trip)
        self.connections[there] = one._replace(
            round_trip=round_trip, **{name: getattr(one, name) + more for name, more in by.items()}
        )

    def look(self, after: float = LOOK_SECONDS, **named: Any) -> Verdict | None:
        links_file(self.logs / "rank-00000.log").write_text(json.dumps(list(self.connections.values())))
        self.now += after
        return self.watch.look([row(0, **named)], {0: 0})


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(tmp_path, monkeypatch)


def test_a_way_that_loses_what_is_sent_is_told_of_once(worker: Worker) -> None:
    assert worker.look() is None, "the first look is what later ones are compared with"
    worker.move(sent=2 * MB, segments=2000, again=130, twice=30, busy=1000)
    assert worker.look() is None, "a window is longer"
    found = worker.look(WINDOW_SECONDS)
    assert found is not None and found.kind == "network"
    words = "the network is bad from 10.0.0.1 to 10.0.0.2: 5.0% of what was sent was lost, and sent again"
    assert found.what == words
    assert found.evidence[-1].startswith(
        "in 20 s 2 MB were sent in 2000 segments, 100 of which were lost; a round trip took 0.3 ms"
    )
    worker.move(sent=2 * MB, segments=2000, again=100)
    assert worker.look(WINDOW_SECONDS) is None, "it was told"


def test_what_was_sent_before_is_not_counted(worker: Worker) -> None:
    """Most of what the connection had sent was lost, before. Nor is lost what had come already."""
    worker.look()
    worker.move(sent=2 * MB, segments=2000, again=700, twice=700, busy=1000)
    assert worker.look(WINDOW_SECONDS) is None


def test_little_is_not_judged_and_the_window_goes_on(worker: Worker) -> None:
    worker.look()
    worker.move(sent=LEAST_BYTES // 2, segments=400, again=200)
    assert worker.look(WINDOW_SECONDS) is None
    worker.move(sent=LEAST_BYTES // 2, segments=400)
    found = worker.look(WINDOW_SECONDS)
    assert found is not None and "25.0% of what was sent" in found.what


def test_nobody_is_asked_outside_of_steps_or_too_often(worker: Worker) -> None:
    file = links_file(worker.logs / "rank-00000.log")
    worker.look(phase="first step")
    assert file.exists(), "it was not read"
    worker.look()
    assert not file.exists()
    worker.look(after=LOOK_SECONDS / 2)
    assert file.exists()


def test_a_new_attempt_begins_without_what_was_left(worker: Worker) -> None:
    worker.look()
    worker.look(after=0)
    worker.watch.begin_attempt()
    assert list(worker.logs.iterdir()) == []
    worker.move(sent=2 * MB, segments=2000, again=1000)
    assert worker.look(WINDOW_SECONDS) is None, "it is the first look again"
    worker.connections = {}
    assert worker.look(WINDOW_SECONDS) is None


def test_connections_of_one_way_are_added_up() -> None:
    one = Connection(HERE, 1, THERE, 9, 0, 0, 0, 0, 0, 900, 5)
    two = Connection(HERE, 2, THERE, 9, 0, 0, 0, 0, 0, 400, 3)
    gone, new = one._replace(port_here=3, sent=7), one._replace(port_here=4, sent=7)
    before = {c.ends: c for c in (one, two, gone)}
    one, two = one._replace(sent=10, segments=8, again=3, twice=1, busy=MB), two._replace(sent=20, busy=3 * MB)
    after = {c.ends: c for c in (one, two, new)}
    assert sum_up(before, after, 6.0) == {(HERE, THERE): Traffic(30, 8, 2, 0.5, 400, 5, 6.0)}


@pytest.mark.parametrize(
    ("traffic", "told"),
    [
        (Traffic(10 * MB, 10_000, 10, 0.9, 200, 11 * MB, 1.0), "in use 90% of the time, it carries 11 MB/s"),
        (Traffic(MB, 1000, 1, 0.9, 200, MB // 4, 1.0), "in use 90% of the time, it carries 0.25 MB/s"),
        (Traffic(10 * MB, 10_000, 10, 0.9, 200, 100 * MB, 1.0), ""),
        (Traffic(10 * MB, 10_000, 10, 0.4, 200, 11 * MB, 1.0), ""),
        (Traffic(10 * MB, 10_000, 100, 0.1, 200, MB, 1.0), "1.0% of what was sent was lost, and sent again"),
        (Traffic(10 * MB, 10_000, 0, 0.1, 52_000, MB, 1.0), "a round trip takes 52 ms at best"),
        (Traffic(MB - 1, 1000, 500, 1.0, 52_000, MB, 9.0), ""),
    ],
)
def test_what_is_bad(traffic: Traffic, told: str) -> None:
    assert find_bad((HERE, THERE), {(HERE, THERE): traffic}) == told


def test_a_way_is_compared_with_the_others_of_its_host() -> None:
    usual = Traffic(10 * MB, 10_000, 0, 0.8, 100, 1000 * MB, 10.0)
    odd = (HERE, "10.0.0.9")
    ways = {(HERE, f"10.0.0.{n}"): usual for n in range(2, 5)} | {odd: replace(usual, rate=200 * MB)}
    told = "in use 80% of the time, it carries 200 MB/s, the others 1,000 MB/s"
    assert {way: find_bad(way, ways) for way in ways} == {way: told * (way == odd) for way in ways}
    ways[odd] = replace(usual, rate=300 * MB)
    assert not any(find_bad(way, ways) for way in ways), "a third is not a quarter"


def test_several_ways_are_one_verdict(worker: Worker) -> None:
    worker.connections[OTHER] = Connection(HERE, 3, OTHER, 2, 0, 0, 0, 0, 0, 6000, 1000 * MB)
    worker.look()
    worker.move(sent=2 * MB, segments=2000, again=1000)
    worker.move(OTHER, sent=2 * MB, segments=2000)
    found = worker.look(WINDOW_SECONDS)
    assert found is not None
    assert found.what.endswith(
        "from 10.0.0.1 to 10.0.0.2: 50.0% of what was sent was lost, and sent again (2 ways in all)"
    )
    assert found.evidence[0] == "from 10.0.0.1 to 10.0.0.3: a round trip takes 6 ms at best"
