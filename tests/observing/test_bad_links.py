"""What is bad of a way to another host; tests/cli/test_running_on_a_network.py has real ones."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.observing import bad_links as module
from allranks.observing.bad_links import (
    LEAST_BYTES,
    LEAST_LOST,
    LOOK_SECONDS,
    WINDOW_SECONDS,
    Finding,
    Traffic,
    Watch,
    findings_file,
    judge,
    read_findings,
    sum_up,
    watch_links,
    write_findings,
)
from allranks.observing.heartbeat import BAD_LINKS, Heartbeat
from allranks.observing.links import WORD, Connection

HERE, THERE, OTHER = "10.0.0.1", "10.0.0.2", "10.0.0.3"
MB = 1_000_000
FINE = Connection(HERE, 1, THERE, 2, 5 * MB, 4000, 3000, 0, 0, 0, 0, 300, 1000 * MB, 0)


def moved(one: Connection, **by: Any) -> Connection:
    """The same some time later."""
    return one._replace(**{name: getattr(one, name) + more for name, more in by.items()})


def windows(watch: Watch, one: Connection, *changes: dict[str, Any]) -> list[list[Finding]]:
    """What is told at the end of each window, after another one in which the connection has moved on so."""
    watch.look([one], 0.0)
    found = []
    for number, change in enumerate(changes, 1):
        one = moved(one, **change)
        found.append(watch.look([one], number * WINDOW_SECONDS))
    return found


LOSES = {"sent": 2 * MB, "segments": 2000, "again": 130, "twice": 30}
CLEAN = {"sent": 2 * MB, "segments": 2000}


def test_a_way_that_loses_what_is_sent_twice_in_a_row_is_told_of_once() -> None:
    """What it had lost before is not counted, nor what had come already."""
    watch = Watch()
    assert watch.look([FINE], 0.0) == []
    later = moved(FINE, **LOSES)
    assert watch.look([later], LOOK_SECONDS) == [], "a window is longer"
    assert watch.look([later], WINDOW_SECONDS) == [], "once may be chance"
    later = moved(later, **LOSES)
    (found,) = watch.look([later], 2 * WINDOW_SECONDS)
    words = "in 15 s 2 MB were sent in 2000 segments, 100 of which were lost; a round trip took 0.3 ms at best"
    assert found.beside == f"{words} (this host's kernel counts)"
    assert (found.here, found.there, found.fault) == (HERE, THERE, "lost")
    assert found.what == "5.0% of what was sent was lost, and sent again"
    far = moved(later, **LOSES, round_trip=9000)
    assert watch.look([far], 3 * WINDOW_SECONDS) == [], "it was told"
    (also,) = watch.look([moved(far, **LOSES)], 4 * WINDOW_SECONDS)
    assert also.fault == "far" and watch.findings == [found, also]


def test_what_is_bad_now_and_then_is_not_told() -> None:
    assert windows(Watch(), FINE, LOSES, CLEAN, LOSES, CLEAN) == [[]] * 4


def test_little_is_not_judged_and_the_window_goes_on_for_its_way_alone() -> None:
    """The bad way carries less than the good one beside it."""
    watch, good, bad = Watch(), FINE._replace(there=OTHER), FINE
    watch.look([good, bad], 0.0)
    found = []
    for number in range(1, 5):
        good, bad = moved(good, **CLEAN), moved(bad, sent=LEAST_BYTES // 2, segments=400, again=200)
        found.append(watch.look([good, bad], number * WINDOW_SECONDS))
    assert found[:3] == [[], [], []]
    (one,) = found[3]
    assert one.there == THERE and one.what.startswith("50.0%") and one.beside.startswith("in 30 s 1 MB")


def test_what_is_opened_after_the_first_look_counts_from_then_on() -> None:
    watch, bulk = Watch(), FINE._replace(port_here=7, sent=0, segments=0, again=0)
    watch.look([FINE], 0.0)
    watch.look([FINE, bulk], 300.0)
    watch.look([FINE, moved(bulk, sent=9 * MB, segments=9000, again=900)], 305.0)
    (found,) = watch.look([FINE, moved(bulk, sent=18 * MB, segments=18_000, again=1800)], 320.0)
    assert found.what.startswith("10.0%")


def test_counters_that_begin_anew_are_followed() -> None:
    before = FINE._replace(segments=WORD - 1000, again=WORD - 10)
    after = moved(before, sent=3 * MB)._replace(segments=1000, again=15)
    found = sum_up({before.ends: before}, {after.ends: after}, 15.0)
    assert (found.segments, found.lost) == (2000, 25)


def test_a_connection_with_the_ports_of_an_old_one_is_another() -> None:
    old = FINE._replace(busy=5 * MB)
    anew = old._replace(sent=9 * MB, segments=10, again=1, busy=MB)
    assert sum_up({old.ends: old}, {anew.ends: anew}, 15.0).sent == 0
    assert sum_up({old.ends: old}, {anew.ends: anew._replace(busy=6 * MB)}, 15.0).lost == 0, "it was never so much"


def test_connections_of_one_way_are_added_up() -> None:
    """In use is the one that the network served longest: a receiver without room is not the network."""
    one = Connection(HERE, 1, THERE, 9, 0, 0, 0, 0, 0, 0, 0, 900, 5, 1)
    two, rests = one._replace(port_here=2, round_trip=400, rate=3, idle=0), one._replace(port_here=5, round_trip=1)
    gone, new = one._replace(port_here=3), one._replace(port_here=4)
    before = {c.ends: c for c in (one, two, gone, rests)}
    one = moved(one, sent=10, segments=8, again=3, twice=1, busy=4 * MB, held_there=3 * MB, held_here=MB // 2)
    after = {c.ends: c for c in (one, moved(two, sent=20, busy=3 * MB), new, rests)}
    assert sum_up(before, after, 8.0) == Traffic(30, 8, 2, 3 / 8, 10.0, False, 400, 8.0)


SLOW = Traffic(10 * MB, 10_000, 10, 0.9, 11.0 * MB, False, 200, 1.0)


@pytest.mark.parametrize(
    ("traffic", "told"),
    [
        (SLOW, ["in use 90% of the time, it carries 11 MB/s"]),
        (replace(SLOW, rate=0.25 * MB), ["in use 90% of the time, it carries 0.25 MB/s"]),
        (replace(SLOW, rate=100.0 * MB), []),
        (replace(SLOW, in_use=0.4), []),
        (replace(SLOW, idle=True), []),
        (replace(SLOW, idle=True, lost=100), ["1.0% of what was sent was lost, and sent again"]),
        (replace(SLOW, idle=True, segments=100, lost=LEAST_LOST - 1), []),
        (replace(SLOW, idle=True, segments=0, lost=0), []),
        (replace(SLOW, idle=True, round_trip=52_000), ["a round trip takes 52 ms at best"]),
        (replace(SLOW, sent=MB - 1, lost=5000, round_trip=52_000), []),
    ],
)
def test_what_is_bad(traffic: Traffic, told: list[str]) -> None:
    assert [one.what for one in judge((HERE, THERE), {(HERE, THERE): traffic})] == told


def test_a_way_is_compared_with_the_others_of_its_host() -> None:
    usual, odd = replace(SLOW, rate=1000.0 * MB), (HERE, "10.0.0.9")
    ways = {(HERE, f"10.0.0.{n}"): usual for n in range(2, 5)} | {odd: replace(usual, rate=200.0 * MB)}
    told = "in use 90% of the time, it carries 200 MB/s, the others 1,000 MB/s"
    assert [(one.there, one.what) for way in ways for one in judge(way, ways)] == [(odd[1], told)]
    ways[odd] = replace(usual, rate=300.0 * MB)
    assert not any(judge(way, ways) for way in ways), "a third is not a quarter"
    ways["192.168.0.1", odd[1]] = replace(usual, rate=100.0 * MB)
    assert not any(judge(way, ways) for way in ways), "another device of this host"


FOUND = Finding(HERE, THERE, "far", "a round trip takes 52 ms at best", "beside")


def test_the_file_is_whole_and_read_as_often_as_one_likes(tmp_path: Path) -> None:
    file = findings_file(tmp_path / "rank-00001.log")
    assert file == tmp_path / "rank-00001.links.json" and read_findings(file) == []
    write_findings(file, [FOUND])
    assert os.listdir(tmp_path) == [file.name]
    assert read_findings(file) == read_findings(file) == [FOUND]
    for damaged in ("[", "[[1]]", '{"a": 1}', '[{"here": 1}]'):
        file.write_text(damaged)
        assert read_findings(file) == []


def test_a_thread_looks_judges_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes on after an error of its own."""
    asked, log, moments = list[frozenset[str]](), tmp_path / "rank-00000.log", iter(range(0, 10_000, 20))
    heartbeat = Heartbeat()
    monkeypatch.setattr(module, "current", lambda: heartbeat)

    def read(hosts: frozenset[str]) -> list[Connection]:
        asked.append(hosts)
        if len(asked) == 2:
            raise RuntimeError("an error of its own")
        if len(asked) > 20:
            threading.Event().wait()
        return [moved(FINE, sent=MB * len(asked), segments=1000 * len(asked), again=300 * len(asked))]

    class Clock:
        """Twenty seconds a look."""

        monotonic = staticmethod(lambda: float(next(moments)))
        sleep = staticmethod(lambda seconds: None)

    monkeypatch.setattr(module, "read_connections", read)
    monkeypatch.setattr(module, "time", Clock)
    watch_links([HERE, THERE], log)
    deadline = time.monotonic() + 20
    while not heartbeat._fields[BAD_LINKS] and time.monotonic() < deadline:
        time.sleep(0.01)
    (found,) = read_findings(findings_file(log))
    assert heartbeat._fields[BAD_LINKS] == 1
    assert found.fault == "lost" and asked[0] == {HERE, THERE}
