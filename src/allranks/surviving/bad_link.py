"""A way to another host that loses what is sent, is slow, or far: which, by how much, as this host's kernel counts it.

The workers write down what the kernel tells of their connections (observing/links.py); a window of some seconds is
judged, and a way that is bad is told of once. Nothing follows: what was lost is sent again, and the run is still right.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import final

from allranks.observing.links import Connection, Ends, links_file, take_links
from allranks.surviving.monitor import Row
from allranks.verdict import Verdict

LOOK_SECONDS = 5.0
WINDOW_SECONDS = 15.0
LEAST_BYTES = 1_000_000
"""Of what was sent in a window; with less nothing is said of it, and the window goes on."""

LOST = 0.01  # of the segments; between hosts of a rack it is less than a thousandth
FAR_MICROSECONDS = 5_000  # a round trip; between the hosts of one place it is less than one
IN_USE = 0.5  # of the time
SLOW_BYTES_A_SECOND = 12.5e6  # 100 Mbit/s
TIMES_SLOWER = 4  # than the other ways of this host

NEXT = (
    "look at the cables, ports and switch between the two (`ip -s link`, `ethtool -S`), or leave that host out; where "
    "the network is meant to be like this, layout.local_sgd, layout.ddp_hook and more samples a step send less"
)

Way = tuple[str, str]
"""The addresses of this host and of another one."""


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a way in a window.

    Attributes:
        sent: bytes.
        segments, lost: that were sent, and of these sent again because they had not come.
        in_use: the part of the time in which something was under way, from 0 to 1, on the busiest connection.
        round_trip: microseconds, on the fastest connection.
        rate: bytes a second, on the fastest connection.
        seconds: of the window.
    """

    sent: int
    segments: int
    lost: int
    in_use: float
    round_trip: int
    rate: int
    seconds: float


@final
class BadLink:
    """Looks after the connections of one host's workers, one attempt after the other.

    Args:
        logs: the folder with the ranks' logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._told: set[Way] = set()
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Workers are about to be started."""
        self._next = time.monotonic() + LOOK_SECONDS
        self._before: dict[Ends, Connection] = {}
        self._since = 0.0
        for old in self._logs.glob("rank-*.links.json"):
            old.unlink(missing_ok=True)

    def look(self, rows: Sequence[Row], places: Mapping[int, int]) -> Verdict | None:
        """See how the ways of the living workers do; what is bad, once for each way.

        Args:
            rows, places: as of `SlowRank.look`; where a worker is does not matter.
        """
        now = time.monotonic()
        if now < self._next or any(row.phase not in ("step", "input") for row in rows):
            return None
        self._next = now + LOOK_SECONDS
        files = (links_file(self._logs / f"rank-{row.rank:05d}.log") for row in rows)
        found = {one.ends: one for file in files for one in take_links(file)}
        if not found:
            return None
        if not self._before:
            self._before, self._since = found, now
        elif now - self._since >= WINDOW_SECONDS:
            ways = sum_up(self._before, found, now - self._since)
            if max((traffic.sent for traffic in ways.values()), default=0) >= LEAST_BYTES:
                self._before, self._since = found, now
                return self._judge(ways)
        return None

    def _judge(self, ways: Mapping[Way, Traffic]) -> Verdict | None:
        bad = {way: because for way in ways if way not in self._told and (because := find_bad(way, ways))}
        self._told |= bad.keys()
        return explain(bad, ways) if bad else None


def sum_up(before: Mapping[Ends, Connection], after: Mapping[Ends, Connection], seconds: float) -> dict[Way, Traffic]:
    """What went over each way between two looks; connections that were opened meanwhile are of the next window."""
    lists: dict[Way, list[tuple[Connection, Connection]]] = {}
    for ends in before.keys() & after.keys():
        lists.setdefault((after[ends].here, after[ends].there), []).append((before[ends], after[ends]))
    return {
        way: _sum_up([pair for pair in pairs if pair[1].sent > pair[0].sent], seconds) for way, pairs in lists.items()
    }


def _sum_up(pairs: Sequence[tuple[Connection, Connection]], seconds: float) -> Traffic:
    again = sum(new.again - old.again - (new.twice - old.twice) for old, new in pairs)
    return Traffic(
        sent=sum(new.sent - old.sent for old, new in pairs),
        segments=sum(new.segments - old.segments for old, new in pairs),
        lost=max(0, again),
        in_use=min(1.0, max((new.busy - old.busy for old, new in pairs), default=0) / (1e6 * seconds)),
        round_trip=min((new.round_trip for _, new in pairs), default=0),
        rate=max((new.rate for _, new in pairs), default=0),
        seconds=seconds,
    )


def find_bad(way: Way, ways: Mapping[Way, Traffic]) -> str:
    """What is bad of a way, in words; "": nothing."""
    traffic = ways[way]
    if traffic.sent < LEAST_BYTES:
        return ""
    found = []
    if traffic.lost >= LOST * traffic.segments:
        found.append(f"{traffic.lost / traffic.segments:.1%} of what was sent was lost, and sent again")
    if traffic.round_trip >= FAR_MICROSECONDS:
        found.append(f"a round trip takes {traffic.round_trip / 1000:.0f} ms at best")
    rates = [one.rate for other, one in ways.items() if other != way and one.sent >= LEAST_BYTES]
    usual = median(rates) if len(rates) > 1 else 0.0
    if traffic.in_use >= IN_USE and traffic.rate < max(SLOW_BYTES_A_SECOND, usual / TIMES_SLOWER):
        beside = f", the others {_rate(usual)}" if usual else ""
        found.append(f"in use {traffic.in_use:.0%} of the time, it carries {_rate(traffic.rate)}{beside}")
    return "; ".join(found)


def _rate(bytes_a_second: float) -> str:
    megabytes = bytes_a_second / 1e6
    return f"{megabytes:,.0f} MB/s" if megabytes >= 10 else f"{megabytes:.2g} MB/s"


def explain(bad: Mapping[Way, str], ways: Mapping[Way, Traffic]) -> Verdict:
    """The verdict on one way, or on several."""
    lines = [f"from {here} to {there}: {because}" for (here, there), because in sorted(bad.items())]
    first, more = lines[0], f" ({len(lines)} ways in all)" if len(lines) > 1 else ""
    return Verdict("network", f"the network is bad {first}{more}", (*lines[1:], *_beside(bad, ways)), NEXT)


def _beside(bad: Iterable[Way], ways: Mapping[Way, Traffic]) -> list[str]:
    """What the worst shows besides."""
    traffic = max((ways[way] for way in bad), key=lambda one: (one.lost, one.in_use))
    sent = f"{traffic.sent / 1e6:.3g} MB were sent in {traffic.segments} segments, {traffic.lost} of which were lost"
    took = f"a round trip took {traffic.round_trip / 1000:.3g} ms at best"
    return [f"in {traffic.seconds:.0f} s {sent}; {took} (this host's kernel counts)"]
