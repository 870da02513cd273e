"""How busy each rank is with work of its own, from when the ranks came to their collectives. Pure, but for one reader.

Who comes late to a collective keeps the others waiting. From one collective to the next a rank works, less the time for
which it waited for the last one to come. A rank that comes to the next before the last one has come to this one did not
wait for it (a bucket of gradients that travels meanwhile); who comes later may have waited, and counts as if it had, so
that what the others work is a lower bound where gradients travel.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import final

PARTS = 4
LEAST_COLLECTIVES = 2 * PARTS
LEAST_LEAD, LEAST_RATIO = 0.2, 1.25

Key = tuple[str, int]
"""One collective: the name of its group, and its number there."""

Moments = Mapping[Key, int]
"""When a rank came to its collectives, in nanoseconds of the host's clock."""


@final
@dataclass(frozen=True, slots=True)
class Lag:
    """A rank for which the others wait.

    Attributes:
        busy: the part of the time in which it does work of its own, from 0 to 1.
        others: that of the others, their median.
    """

    rank: int
    busy: float
    others: float

    @property
    def lead(self) -> float:
        """The part of everybody's time that goes on it."""
        return self.busy - self.others


def find_slowest(arrivals: Mapping[int, Moments], since: int = 0) -> Lag | None:
    """The rank that works for longer than the others, all the time and by at least a fifth of it; None: there is none.

    Args:
        arrivals: by rank; ranks that do alike, at least two. The window is what all of them know.
        since: what was before is not looked at.
    """
    kept = {rank: sorted((at, key) for key, at in moments.items() if at >= since) for rank, moments in arrivals.items()}
    if len(kept) < 2 or any(len(times) < LEAST_COLLECTIVES for times in kept.values()):
        return None
    begin, end = max(times[0][0] for times in kept.values()), min(times[-1][0] for times in kept.values())
    if end <= begin:
        return None
    released: dict[Key, int] = {}
    for moments in arrivals.values():
        for key, at in moments.items():
            released[key] = max(at, released.get(key, at))
    shares = {rank: _busy_shares(times, released, begin, end) for rank, times in kept.items()}
    found = [lag for rank in shares if (lag := _judge(rank, shares)) is not None]
    return max(found, key=lambda lag: lag.lead, default=None)


def _busy_shares(
    times: Sequence[tuple[int, Key]], released: Mapping[Key, int], begin: int, end: int
) -> Sequence[float]:
    """The part of each of PARTS equal parts of the window in which a rank works."""
    part = (end - begin) / PARTS
    busy = [0.0] * PARTS
    for (before, key), (at, _) in pairwise(times):
        start = released[key] if released[key] <= at else before
        for number in range(PARTS):  # work may reach from one part into the next
            first = begin + number * part
            busy[number] += max(0.0, min(at, first + part) - max(start, first))
    return [seconds / part for seconds in busy]


def _judge(rank: int, shares: Mapping[int, Sequence[float]]) -> Lag | None:
    """Whether it is slow in each part: what happens once (a checkpoint, another program) does not make a rank slow."""
    own = shares[rank]
    others = [median(shares[other][number] for other in shares if other != rank) for number in range(PARTS)]
    slow = all(
        mine >= LEAST_RATIO * theirs and mine - theirs >= LEAST_LEAD for mine, theirs in zip(own, others, strict=True)
    )
    return Lag(rank, sum(own) / PARTS, sum(others) / PARTS) if slow else None


@final
@dataclass(frozen=True, slots=True)
class Told:
    """What a rank says of itself.

    Attributes:
        stage: its place among the stages of a pipeline; 0 without.
        moments: when it came to its collectives.
    """

    stage: int
    moments: Moments


def read_arrivals(path: Path, rank: int) -> Told | None:
    """What the worker of this rank wrote of itself; None where it cannot be read. The file goes."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        path.unlink(missing_ok=True)
        stage = next((one["ranks"].index(rank) for one in told["groups"] if one["axis"] == "pp"), 0)
        return Told(stage, {(str(group), int(number)): int(at) for group, number, at in told["arrivals"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None
