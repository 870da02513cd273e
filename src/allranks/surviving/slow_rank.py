"""A rank that keeps the others of its host waiting step after step: which, by how much, and where it spends the time.

Every few steps the workers are asked when they came to their collectives (surviving/arrivals.py); where one of them
works for longer than the others all the time, its stack is looked at a few times, and the verdict is told. Nothing
follows: a slow run is still right. Where they know of no arrivals (over NCCL, without torch's recorder) they are asked
once in an attempt: to answer is to write all out that the recorders keep.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, final

from allranks.failure import log_file
from allranks.observing.collectives import collectives_file
from allranks.observing.heartbeat import STACK_SIGNAL
from allranks.surviving.arrivals import Lag, find_slowest, read_arrivals
from allranks.surviving.beats import SharedBeats
from allranks.surviving.evidence import Frame, main_stack, size_of, tail
from allranks.surviving.kernel import core_seconds
from allranks.surviving.monitor import Row
from allranks.verdict import Verdict

FIRST_STEPS, BETWEEN_STEPS, BETWEEN_SECONDS = 20, 25, 15.0
ANSWER_SECONDS = 10.0
LOOKS = 8
STARVED = 0.2  # of the time: then it is told that it waited for a core

WORDS = {"input": "loading data", "checkpoint": "saving", "evaluation": "evaluating"}
GENERAL = (
    "see what that process has less of than the others: cores (other programs, a quota), clock and temperature of its "
    "device (`nvidia-smi -q -d PERFORMANCE`), its bus"
)


@final
@dataclass(slots=True)
class _Suspicion:
    """A slow rank whose stack is looked at.

    Attributes:
        seen: where it was, and what it did, each time.
        offset: of its log, before the newest look.
        core, began: what the kernel told of its core (ran, waited) when this began, and when.
    """

    lag: Lag
    pid: int
    offset: int
    core: tuple[float, float] | None
    began: float
    seen: list[tuple[str, Frame | None]] = field(default_factory=list)


@final
class SlowRank:
    """Looks after one host's workers, one attempt after the other.

    Args:
        beats: where they show themselves.
        logs: the folder with the ranks' logs.
    """

    def __init__(self, beats: SharedBeats, logs: Path) -> None:
        self._beats, self._logs = beats, logs
        self._state: Literal["rests", "asked"] | _Suspicion = "rests"
        self._told: int | None = None
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Workers are about to be started."""
        self._state = "rests"
        self._next_step: int | None = None
        self._next_time = self._asked_at = 0.0
        self._since = self._until = 0

    def look(self, rows: Sequence[Row], places: Mapping[int, int]) -> Verdict | None:
        """See how the living workers do; what is slow, once.

        Args:
            rows: of the workers, as the monitor sees them.
            places: global rank -> local rank.
        """
        if len(rows) < 2:
            return None
        match self._state:
            case "rests":
                self._ask_when_due(rows)
            case "asked":
                self._hear(rows, places)
            case _Suspicion() as suspicion:
                return self._look_at(suspicion, rows)
        return None

    def _ask_when_due(self, rows: Sequence[Row]) -> None:
        step = min(row.step for row in rows)
        if self._next_step is None:
            if all(row.phase in ("step", "input") for row in rows):  # the first step of this attempt is done
                self._next_step, self._since = step + FIRST_STEPS, time.time_ns()
            return
        if step < self._next_step or time.monotonic() < self._next_time:
            return
        self._beats.ask()
        self._state, self._asked_at, self._until = "asked", time.monotonic(), time.time_ns()
        self._next_step, self._next_time = step + BETWEEN_STEPS, time.monotonic() + BETWEEN_SECONDS

    def _hear(self, rows: Sequence[Row], places: Mapping[int, int]) -> None:
        if not all(self._beats.answered(places[row.rank]) for row in rows):
            if time.monotonic() - self._asked_at > ANSWER_SECONDS:
                self._state = "rests"
            return
        self._state = "rests"
        told = {row.rank: read_arrivals(collectives_file(self._log(row.rank)), row.rank) for row in rows}
        if all(one is not None and not one.moments for one in told.values()):
            self._next_time = math.inf
            return
        by_stage: dict[int, dict[int, Mapping[tuple[str, int], int]]] = {}
        for rank, one in told.items():
            if one is not None:
                by_stage.setdefault(one.stage, {})[rank] = one.moments
        lags = [lag for alike in by_stage.values() if (lag := find_slowest(alike, self._since)) is not None]
        self._since = self._until
        lag = max(lags, key=lambda one: one.lead, default=None)
        if lag is None or lag.rank == self._told:
            self._told = None if lag is None else self._told
            return
        pid = next(row.pid for row in rows if row.rank == lag.rank)
        self._state = _Suspicion(lag, pid, size_of(self._log(lag.rank)), core_seconds(pid), time.monotonic())
        _signal(pid)

    def _look_at(self, suspicion: _Suspicion, rows: Sequence[Row]) -> Verdict | None:
        row = next((row for row in rows if row.rank == suspicion.lag.rank and row.pid == suspicion.pid), None)
        if row is None:
            self._state = "rests"
            return None
        log = self._log(row.rank)
        stack = main_stack(tail(log, suspicion.offset))
        own = next((frame for frame in stack if frame.of_the_user), None)
        suspicion.seen.append((row.phase, own))
        if len(suspicion.seen) < LOOKS:
            suspicion.offset = size_of(log)
            _signal(row.pid)
            return None
        self._state, self._told = "rests", row.rank
        return explain(suspicion.lag, row.step, suspicion.seen, _starved(suspicion))

    def _log(self, rank: int) -> Path:
        return log_file(self._logs, rank)


def explain(lag: Lag, step: int, seen: Sequence[tuple[str, Frame | None]], starved: float) -> Verdict:
    """The verdict.

    Args:
        step: the last that is done.
        seen: what the rank did in each look, and its line of the user's.
        starved: the part of the time in which it wanted a core and had none.
    """
    what = (
        f"rank {lag.rank} is slow: it works {lag.busy:.0%} of the time, the others {lag.others:.0%} of theirs and wait "
        f"for it in the rest; without that a step would take {1 - lag.lead:.0%} of its time (after step {step})"
    )
    phase, times = Counter(phase for phase, _ in seen).most_common(1)[0]
    evidence = [f"in {times} of {len(seen)} looks it was {WORDS.get(phase, 'in a step')}"]
    move = GENERAL
    places = Counter(frame for _, frame in seen if frame is not None)
    if places:
        place, times = places.most_common(1)[0]
        evidence.append(f"in {times} of {len(seen)} looks its line was {place}")
        move = f"look at {place}, and at what it does on this rank alone; where it is the same everywhere, {GENERAL}"
    if starved >= STARVED:
        evidence.append(f"for {starved:.0%} of that time it wanted a core and had none: other processes took it")
    return Verdict("slow_rank", what, tuple(evidence), move)


def _starved(suspicion: _Suspicion) -> float:
    now, elapsed = core_seconds(suspicion.pid), time.monotonic() - suspicion.began
    if now is None or suspicion.core is None or elapsed <= 0:
        return 0.0
    return (now[1] - suspicion.core[1]) / elapsed


def _signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
