"""A way to another host that loses what is sent, is far, or slow: which, by how much, as this host's kernel counts it.

A thread of each worker reads what the kernel knows of the worker's connections to the run's other hosts, judges windows
of some seconds, and writes down what is bad twice in a row, once for each way and each fault, in a file of which the
heartbeat tells the agent (surviving/bad_link.py). Nothing is written where nothing is bad.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import final

from allranks.observing.heartbeat import current
from allranks.observing.links import WORD, Connection, Ends, read_connections

LOOK_SECONDS = 5.0
LOOKS_ARE_RARE = 100  # times as long as the last one took, a thread rests at least
WINDOW_SECONDS = 15.0
LEAST_BYTES, LEAST_LOST = 1_000_000, 20
"""Of what was sent in a window of a way; with less nothing is said of it, and the window goes on."""

LOST = 0.01  # of the segments; between hosts of a rack it is less than a thousandth
FAR_MICROSECONDS = 5_000  # a round trip; between the hosts of one place it is less than one
IN_USE = 0.5  # of the time
SLOW_BYTES_A_SECOND = 12.5e6  # 100 Mbit/s
TIMES_SLOWER = 4  # than the other ways of this host

Way = tuple[str, str]
"""The addresses of this host and of another one."""


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a way in a window.

    Attributes:
        sent: bytes, with those that were sent again.
        segments, lost: that were sent, and of these sent again because they had not come.
        in_use: the part of the time in which the network had something to carry, from 0 to 1, on the connection that
            used it most; `rate`: bytes a second that all carried in that time, or what the kernel measured there, if
            that is more; `idle`: whether it might carry more.
        round_trip: microseconds, on the fastest connection.
        seconds: of the window.
    """

    sent: int
    segments: int
    lost: int
    in_use: float
    rate: float
    idle: bool
    round_trip: int
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What is bad of a way.

    Attributes:
        fault: "lost", "far" or "slow".
        what, beside: in words.
    """

    here: str
    there: str
    fault: str
    what: str
    beside: str


@final
class Watch:
    """Judges one process's ways, window by window.

    Attributes:
        findings: all there were.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._told: set[tuple[Way, str]] = set()
        self._windows: dict[Way, tuple[dict[Ends, Connection], float]] = {}  # as they began, and when
        self._last: dict[Way, Traffic] = {}  # of the newest window that has ended
        self._suspected: dict[Way, frozenset[str]] = {}  # faults in that

    def look(self, connections: Sequence[Connection], now: float) -> list[Finding]:
        """What is found to be bad for the second time in a row, and was not told before.

        Args:
            connections: as they are now.
            now: seconds of the monotonic clock.
        """
        by_way: dict[Way, dict[Ends, Connection]] = {}
        for one in connections:
            by_way.setdefault((one.here, one.there), {})[one.ends] = one
        ended = [way for way, found in by_way.items() if self._ends(way, found, now)]
        new = []
        for way in ended:
            faults = {one.fault: one for one in judge(way, self._last)}
            before, self._suspected[way] = self._suspected.get(way, frozenset()), frozenset(faults)
            new += [one for fault, one in faults.items() if fault in before and (way, fault) not in self._told]
            self._told |= {(way, fault) for fault in before & faults.keys()}
        self.findings += new
        return new

    def _ends(self, way: Way, found: dict[Ends, Connection], now: float) -> bool:
        """Whether the way's window is over: there is its traffic, and a new one begins."""
        before, since = self._windows.setdefault(way, (found, now))
        traffic = sum_up(before, found, now - since)
        if now - since < WINDOW_SECONDS or traffic.sent < LEAST_BYTES:
            # What was opened since counts from here on, and what is closed no more.
            self._windows[way] = {ends: before.get(ends, one) for ends, one in found.items()}, since
            return False
        self._windows[way], self._last[way] = (found, now), traffic
        return True


def sum_up(before: Mapping[Ends, Connection], after: Mapping[Ends, Connection], seconds: float) -> Traffic:
    """What went over a way between two looks."""
    pairs = [(before[ends], after[ends]) for ends in before.keys() & after.keys()]
    # One that was opened anew with the same ports has counters of its own.
    pairs = [(old, new) for old, new in pairs if new.sent > old.sent and _used(new) >= _used(old)]
    if not pairs:
        return Traffic(0, 0, 0, 0.0, 0.0, True, 0, seconds)
    again = sum((new.again - old.again) % WORD - (new.twice - old.twice) % WORD for old, new in pairs)
    sent, segments = (
        sum(new.sent - old.sent for old, new in pairs),
        sum((new.segments - old.segments) % WORD for old, new in pairs),
    )
    microseconds, busiest = max(((_used(new) - _used(old), new) for old, new in pairs), key=lambda one: one[0])
    return Traffic(
        sent=sent,
        segments=segments,
        lost=again if 0 < again <= segments else 0,
        in_use=min(1.0, microseconds / (1e6 * seconds)),
        # Confirmations that are held back make it seem in use for longer, and what the kernel measured last may be old.
        rate=max(busiest.rate, 1e6 * sent / max(1, microseconds)),
        idle=bool(busiest.idle),
        round_trip=min(new.round_trip for _, new in pairs),
        seconds=seconds,
    )


def _used(connection: Connection) -> int:
    return max(0, connection.busy - connection.held_there - connection.held_here)


def judge(way: Way, ways: Mapping[Way, Traffic]) -> list[Finding]:
    """What is bad of a way, beside the others of this process from the same address."""
    traffic = ways[way]
    if traffic.sent < LEAST_BYTES:
        return []
    found = {}
    if traffic.lost >= max(LEAST_LOST, LOST * traffic.segments):
        found["lost"] = f"{traffic.lost / max(1, traffic.segments):.1%} of what was sent was lost, and sent again"
    if traffic.round_trip >= FAR_MICROSECONDS:
        found["far"] = f"a round trip takes {traffic.round_trip / 1000:.0f} ms at best"
    beside = [one for other, one in ways.items() if other != way and other[0] == way[0]]
    rates = [one.rate for one in beside if one.in_use >= IN_USE or not one.idle]
    usual = median(rates) if len(rates) > 1 else 0.0
    slow = traffic.rate < max(SLOW_BYTES_A_SECOND, usual / TIMES_SLOWER)
    if slow and traffic.in_use >= IN_USE and not traffic.idle:
        others = f", the others {_rate(usual)}" if usual else ""
        found["slow"] = f"in use {traffic.in_use:.0%} of the time, it carries {_rate(traffic.rate)}{others}"
    sent = f"{traffic.sent / 1e6:.3g} MB were sent in {traffic.segments} segments, {traffic.lost} of which were lost"
    took = f"a round trip took {traffic.round_trip / 1000:.3g} ms at best"
    text = f"in {traffic.seconds:.0f} s {sent}; {took} (this host's kernel counts)"
    return [Finding(*way, fault, what, text) for fault, what in found.items()]


def _rate(bytes_a_second: float) -> str:
    megabytes = bytes_a_second / 1e6
    return f"{megabytes:,.0f} MB/s" if megabytes >= 10 else f"{megabytes:.2g} MB/s"


def findings_file(log: Path) -> Path:
    """Where the worker with this log writes what it has found."""
    return log.with_suffix(".links.json")


def read_findings(path: Path) -> list[Finding]:
    """What a worker wrote; [] where it has found nothing, or what cannot be read."""
    try:
        return [Finding(**one) for one in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return []


def write_findings(path: Path, findings: Sequence[Finding]) -> None:
    """Write all of them, whole or not at all. Raises OSError."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps([asdict(one) for one in findings]), encoding="utf-8")
    temporary.replace(path)


def watch_links(hosts: Collection[str], log: Path) -> None:
    """From here on, in a thread: look, judge, write down what is bad, and let the agent see that."""
    with contextlib.suppress(Exception):  # it only tells: no error of it may end a run
        threading.Thread(
            target=_watch, args=(frozenset(hosts), findings_file(log)), name="allranks-links", daemon=True
        ).start()


def _watch(hosts: Collection[str], path: Path) -> None:
    watch, rest, written = Watch(), LOOK_SECONDS, 0
    while True:
        time.sleep(rest)
        began = time.monotonic()
        with contextlib.suppress(Exception):
            watch.look(read_connections(hosts), began)
            if len(watch.findings) > written:
                write_findings(path, watch.findings)
                written = len(watch.findings)
                current().found_bad_links(written)
        rest = max(LOOK_SECONDS, LOOKS_ARE_RARE * (time.monotonic() - began))
