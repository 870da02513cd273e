"""What journals tell, as values: attempts, the loss curve, the pace, where the time went. Pure functions of events.

A journal may be cut off anywhere and may come from a later version, so nothing here takes a field for granted.
"""

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite, nan
from typing import Any, final

from allranks.verdict import Decision, Verdict

Event = Mapping[str, Any]
Events = Sequence[Event]

CURVE_POINTS = 48


@final
@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of training; times in Unix seconds, `reason` None where its end was never written."""

    number: int
    started: float
    ended: float
    last_step: int
    world_size: int
    layout: str
    device: str
    host: str
    reason: str | None


@final
@dataclass(frozen=True, slots=True)
class LossCurve:
    """The training loss; `points` are (last step, mean loss) of at most 48 stretches, NaN where none is finite."""

    first: float
    last: float
    lowest: float
    lowest_step: int
    num_not_finite: int
    points: tuple[tuple[int, float], ...]


def number(event: Event, name: str) -> float | None:
    """A field as a float, also where the journal spells it ("loss_text": "nan"); None where there is none."""
    value = event.get(name)
    if isinstance(value, int | float):
        with contextlib.suppress(OverflowError):  # a whole number that is none of ours
            return float(value)
    text = event.get(f"{name}_text")
    return float(text) if text in ("nan", "inf", "-inf") else None


def whole(event: Event, name: str) -> int:
    """A field as a whole number; 0 where there is none."""
    value = number(event, name)
    return int(value) if value is not None and isfinite(value) else 0


def word(event: Event, name: str) -> str:
    """A field as text; empty where there is none."""
    value = event.get(name)
    return "" if value is None else str(value)


def numbers(event: Event, name: str) -> dict[str, float]:
    """A table of numbers ({"metrics": {...}}); empty where there is none."""
    table = event.get(name)
    if not isinstance(table, Mapping):
        return {}
    names = [key.removesuffix("_text") if table[key] in ("nan", "inf", "-inf") else key for key in table]
    return {key: value for key in names if (value := number(table, key)) is not None}


def split_attempts(events: Events) -> list[list[Event]]:
    """One rank's events, cut at each `start`; what stands before the first is left out."""
    attempts: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return attempts


def find_attempts(events: Events) -> tuple[Attempt, ...]:
    """The attempts in rank 0's journal."""
    found = []
    for index, attempt in enumerate(split_attempts(events), start=1):
        start = attempt[0]
        end = next((event for event in attempt if event["event"] == "end"), None)
        times = [time for event in attempt if (time := number(event, "t")) is not None] or [0.0]
        found.append(
            Attempt(
                number=whole(start, "attempt") or index,
                started=times[0],
                ended=times[-1],
                last_step=max((whole(event, "step") for event in attempt), default=0),
                world_size=whole(start, "world_size") or 1,
                layout=word(start, "layout"),
                device=word(start, "device"),
                host=word(start, "host"),
                reason=word(end, "reason") if end is not None else None,
            )
        )
    return tuple(found)


def loss_curve(steps: Events) -> LossCurve | None:
    """The loss over the steps; None before the first loss."""
    losses = [(whole(event, "step"), loss) for event in steps if (loss := number(event, "loss")) is not None]
    if not losses:
        return None
    lowest_step, lowest = min(losses, key=lambda pair: pair[1] if isfinite(pair[1]) else inf)
    size = -(-len(losses) // CURVE_POINTS)
    stretches = [losses[at : at + size] for at in range(0, len(losses), size)]
    points = tuple((stretch[-1][0], _mean(loss for _, loss in stretch)) for stretch in stretches)
    bad = sum(not isfinite(loss) for _, loss in losses)
    return LossCurve(losses[0][1], losses[-1][1], lowest, lowest_step, bad, points)


def find_pace(steps: Events) -> tuple[float | None, float | None]:
    """Median seconds of a step and median samples per second; the first step, which warms up, is left out."""
    seconds, rates = [], []
    for before, step in pairwise(steps):
        took = number(step, "seconds")
        if took is None or not took > 0:
            continue
        seconds.append(took)
        if whole(step, "step") == whole(before, "step") + 1:
            rates.append((whole(step, "samples") - whole(before, "samples")) / took)
    return _median(seconds), _median(rates)


def seconds_by_cause(events: Events) -> tuple[dict[str, float], float]:
    """Where the time of the attempts that ended in order went, and the seconds of the steps of the others."""
    causes: dict[str, float] = {}
    unsplit = 0.0
    for attempt in split_attempts(events):
        split = next((numbers(event, "seconds") for event in attempt if event["event"] == "end"), {})
        for cause, seconds in split.items():
            causes[cause] = causes.get(cause, 0.0) + seconds
        if not split:
            unsplit += sum(number(event, "seconds") or 0.0 for event in attempt if event["event"] == "step")
    return causes, unsplit


def peak_memory(journals: Mapping[int, Events]) -> dict[int, int]:
    """Peak memory in bytes by rank, where a journal says it."""
    peaks = {rank: max((whole(e, "memory_bytes") for e in events), default=0) for rank, events in journals.items()}
    return {rank: peak for rank, peak in sorted(peaks.items()) if peak}


def find_decisions(events: Events) -> tuple[Decision, ...]:
    """The decisions in the order in which they were first taken; one that every attempt repeats stands once."""
    found = [Decision(word(e, "what"), word(e, "because")) for e in events if e["event"] == "decision"]
    return tuple(dict.fromkeys(found))


def find_verdicts(journals: Iterable[Events]) -> tuple[Verdict, ...]:
    """Every verdict that any rank wrote, in the order of time."""
    events = [event for events in journals for event in events if event["event"] == "verdict"]
    events.sort(key=lambda event: number(event, "t") or 0.0)
    return tuple(Verdict(word(e, "kind"), word(e, "what"), _words(e, "evidence"), word(e, "next")) for e in events)


def _words(event: Event, name: str) -> tuple[str, ...]:
    lines = event.get(name)
    return tuple(map(str, lines)) if isinstance(lines, list) else ()


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if isfinite(value)]
    return sum(finite) / len(finite) if finite else nan


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
