"""When a rank computes, sends and waits in the predicted step: the dry run's order with the Estimate's seconds.

Computation, and every message that stops it, takes what the Estimate says, shared out by FLOPs and by bytes. Messages
of the data axes run beside computation: what FSDP gathers is asked for one unit ahead and is there before its unit
computes; what is reduced goes when it is made. Bubbles are where the schedule of equal stages has them.

How much of the data axes' messages stops computation is in the Estimate a formula, and here it follows from the order:
where it is less, the rest is one bar before the optimizer; where it is more, these messages are all drawn shorter by
one factor. So the end is that of the Estimate's step.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from allranks.plan import Estimate
from allranks.rehearsal import Part, RankRehearsal, Work
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from allranks.reporting.timeline import make_timeline

DATA = ("dp_replicate", "dp_shard", "all", COPIES_OF_EXPERTS)
"""How the names of the data axes begin in a dry run."""
DATA_ROWS = ("dp", COPIES_OF_EXPERTS)
"""How those of an Estimate's rows begin that have their messages."""
CAUSES = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}
"""Axis -> the part of a StepTime that its messages take."""
COMPUTE = "compute"
BEHIND = ("optimizer", "offload", "input", "checkpoint")
"""Parts of a StepTime that a dry run has no work for, or not in its place: they follow the work, one bar each."""
HALVINGS = 50
NOTHING = 1e-9
"""Seconds that no trace shows."""


@final
@dataclass(frozen=True, slots=True)
class Span:
    """Something on a track, in seconds from the start of the step."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's step.

    Attributes:
        spans: those of one track follow one another.
        shortened: the factor by which messages of the data axes take less than the Estimate says of all of them.
    """

    spans: tuple[Span, ...]
    shortened: float


@final
@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds a FLOP, a byte by axis (one that the Estimate does not know takes none), and of bubbles by turn."""

    flop: float
    by_axis: Mapping[str, float]
    bubbles: Mapping[int, float]


def order_rank(rank: RankRehearsal, estimate: Estimate) -> RankStep:
    """The step of one rank, which ends when the Estimate's does."""
    time = estimate.time
    rates = _Rates(_seconds_a_flop(rank, estimate), _seconds_a_byte(rank, estimate), _bubbles(rank, estimate))
    ends = time.total - sum(getattr(time, cause) for cause in BEHIND)
    low, high = (1.0, 1.0) if _Clock(rates, 1.0).run(rank.works) <= ends + NOTHING else (0.0, 1.0)
    for _ in range(HALVINGS if low < high else 0):
        middle = (low + high) / 2
        late = _Clock(rates, middle).run(rank.works) > ends
        low, high = (low, middle) if late else (middle, high)
    clock = _Clock(rates, low)
    start = clock.run(rank.works)
    if ends - start > NOTHING:
        clock.spans.append(Span(COMPUTE, "other waits", start, ends))
    start = max(start, ends)
    for cause in BEHIND:
        if seconds := getattr(time, cause):
            clock.spans.append(Span(COMPUTE, cause, start, start + seconds))
            start += seconds
    return RankStep(tuple(clock.spans), low)


@final
class _Clock:
    """Goes through the work; `scale` is that of the messages of the data axes."""

    def __init__(self, rates: _Rates, scale: float) -> None:
        self.spans: list[Span] = []
        self._rates, self._scale = rates, scale
        self._now = self._waited = 0.0
        self._free: defaultdict[str, float] = defaultdict(float)
        self._asked: deque[float] = deque()
        """When each unit is there that is asked for and that nothing has waited for."""

    def run(self, works: Sequence[Work]) -> float:
        """Seconds until all of it is done, what is reduced included."""
        turn, gathering = 0, ""
        for what, work in _spread(works):
            if work.turn != turn:
                turn = work.turn
                self._wait_for_turn(self._rates.bubbles.get(turn, 0.0))
            for part in work.parts:
                if part.message is not None:
                    self._send(part, what, again=bool(part.unit) and part.unit == gathering)
                elif part.flops:
                    self._compute(part.flops, what)
                else:
                    self._now = max(self._now, self._asked.popleft() if self._asked else 0.0)
                    self._waited = self._now
                gathering = part.unit
        self._wait_for_turn(self._rates.bubbles.get(-1, 0.0))
        return max([self._now, *self._free.values()])

    def _compute(self, flops: float, what: str) -> None:
        end = self._now + flops * self._rates.flop
        self.spans.append(Span(COMPUTE, what, self._now, end, {"flops": flops}))
        self._now = end

    def _wait_for_turn(self, seconds: float) -> None:
        if seconds > NOTHING:
            self.spans.append(Span(COMPUTE, "bubble", self._now, self._now + seconds))
            self._now += seconds

    def _send(self, part: Part, what: str, *, again: bool) -> None:
        """`again`: it is another message for the unit of the one before."""
        axis, op, num_bytes = part.message or ("", "", 0)
        seconds = num_bytes * self._rates.by_axis[axis]
        beside = axis.startswith(DATA)
        asked = self._waited if part.unit else self._now
        start = max(asked, self._free[axis])
        end = start + seconds * (self._scale if beside else 1.0)
        self._free[axis] = end
        self.spans.append(Span(axis, op, start, end, {"bytes": num_bytes, "for": part.unit or what}))
        if not beside:
            self._now = max(self._now, end)
        elif again:
            self._asked[-1] = end
        elif part.unit:
            self._asked.append(end)


def _spread(works: Sequence[Work]) -> Iterator[tuple[str, Work]]:
    """Every stretch as often as it happens, with its name, and its number where it is not the first."""
    for work in works:
        what = f"{work.phase} {work.block or 'of the model'}"
        for number in range(work.times):
            yield what + (f" (+{number})" if number else ""), work


def _seconds_a_flop(rank: RankRehearsal, estimate: Estimate) -> float:
    return (estimate.time.compute + estimate.time.recompute) / rank.flops if rank.flops else 0.0


def _seconds_a_byte(rank: RankRehearsal, estimate: Estimate) -> dict[str, float]:
    moved: Counter[str] = Counter()
    for work in rank.works:
        for part in work.parts:
            if part.message is not None:
                moved[part.message[0]] += part.message[2] * work.times
    planned = {row.axis: row.seconds for row in estimate.traffic if row.axis.startswith(DATA_ROWS)}
    data: Counter[str] = Counter()
    for axis, num_bytes in moved.items():
        if axis.startswith(DATA):
            data[_planned_axis(axis, planned)] += num_bytes
    return {
        axis: planned.get(row, 0.0) / data[row]
        if axis.startswith(DATA) and data[row := _planned_axis(axis, planned)]
        else getattr(estimate.time, CAUSES[axis]) / num_bytes
        if axis in CAUSES and num_bytes
        else 0.0
        for axis, num_bytes in moved.items()
    }


def _planned_axis(axis: str, planned: Mapping[str, float]) -> str:
    """The row of the plan that has a data axis' traffic: under HSDP one of two, and of experts' copies their own."""
    if axis == COPIES_OF_EXPERTS:
        return axis
    if "dp_replicate" not in planned:
        return "dp"
    return "dp_shard" if "dp_shard" in axis else "dp_replicate"


def _bubbles(rank: RankRehearsal, estimate: Estimate) -> dict[int, float]:
    """Seconds of waiting before each turn; behind the last one as -1; all of them there where the turns are others."""
    layout, bubble = estimate.choice.layout, estimate.time.bubble
    if layout.pp == 1:
        return {-1: bubble}
    timeline = make_timeline(estimate.choice, estimate.time, whole=True)
    bars = sorted(
        (bar for bar in timeline.bars if bar.rank == layout.stage_rank(rank.stage)), key=lambda bar: bar.start
    )
    turns = dict.fromkeys((work.turn, work.phase) for work in rank.works if work.phase in ("forward", "backward"))
    if [phase for _, phase in turns] != [bar.action.kind for bar in bars]:
        return {-1: bubble}
    gaps = [bar.start - before for bar, before in zip(bars, [0.0, *(bar.end for bar in bars)], strict=False)]
    gaps.append(timeline.seconds - bars[-1].end)
    whole = sum(gaps)
    places = [*(turn for turn, _ in turns), -1]
    return {turn: gap / whole * bubble for turn, gap in zip(places, gaps, strict=True)} if whole else {-1: bubble}
