"""When every rank of a pipeline runs which forward and backward, drawn from the schedule and equal stages."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from allranks.layout import Layout
from allranks.plan import Choice, StepTime
from allranks.reporting.there_and_back import Kind, order_dualpipev, order_zbv

SPLIT = ("interleaved_zb", "zbv", "dualpipev")
"""Schedules whose backward is drawn in two halves."""

ROUNDS = 4
"""That one picture shows: so many micro-steps for each rank, and at least twice as many as there are stages."""

ALONE = 16
"""Micro-steps that the picture of one device shows."""


@final
@dataclass(frozen=True, slots=True)
class Action:
    """The forward or backward of one micro-step through one stage; "weight" is the half of a split backward."""

    kind: Kind
    stage: int
    micro_step: int


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """An Action on a pipeline's rank, in seconds from the start of the step."""

    rank: int
    action: Action
    start: float
    end: float


@final
@dataclass(frozen=True, slots=True)
class Timeline:
    """The micro-steps of one optimizer step, as far as they are drawn, and what follows them.

    Attributes:
        shown: micro-steps of `micro_steps` that are drawn.
        seconds: until the last of them is done.
        idle: seconds of them in which a rank waits for others; as many of the whole step, whose middle repeats.
        after: (cause, seconds) of what every rank does when its micro-steps are done.
    """

    bars: tuple[Bar, ...]
    shown: int
    micro_steps: int
    seconds: float
    idle: float
    after: tuple[tuple[str, float], ...]


def order_actions(layout: Layout, rank: int, num_micro_steps: int) -> list[Action]:
    """What one rank of the pipeline runs, in order.

    Forwards alone until the pipeline is full, then forwards and backwards by turns, then the backwards that are left.
    1F1B and interleaved: 2104.04473, section 2.2; interleaved_zb: ZB-H1 of 2401.10241, whose ranks are `rank` weight
    halves behind. gpipe and looped_bfs (2211.05953) run all forwards first. zbv and dualpipev: `there_and_back`.
    Micro-steps that do not fit the schedule go through in turn, all forwards first.
    """
    chunks, pp = layout.num_stages // layout.pp, layout.pp
    stages = [stage for stage in range(layout.num_stages) if layout.stage_rank(stage) == rank]
    schedule = "1f1b" if pp == 1 else layout.schedule if layout.fits_schedule(num_micro_steps) else "in turn"
    if schedule in ("zbv", "dualpipev"):
        order = order_zbv if schedule == "zbv" else order_dualpipev
        return [Action(kind, stages[turn], number) for kind, turn, number in order(rank, pp, num_micro_steps)]
    total, all_first = chunks * num_micro_steps, schedule in ("gpipe", "looped_bfs", "in turn")
    in_round = {"looped_bfs": num_micro_steps, "in turn": 1}.get(schedule, pp)

    def visits(kind: Kind, chunk_order: range) -> list[Action]:
        if chunks == 1:
            return [Action(kind, rank, number) for number in range(num_micro_steps)]
        turns = [range(first, first + in_round) for first in range(0, num_micro_steps, in_round)]
        if kind == "backward" and schedule == "looped_bfs":
            turns = [turn[::-1] for turn in turns]  # the last forward's backward can start at once
        return [Action(kind, stages[chunk], number) for turn in turns for chunk in chunk_order for number in turn]

    split = schedule == "interleaved_zb"
    ahead = (chunks - 1) * in_round + (1 if split or chunks == 1 else 2) * (pp - 1 - rank)
    ahead = total if all_first else min(total, ahead)
    forwards, backwards = visits("forward", range(chunks)), visits("backward", range(chunks - 1, -1, -1))
    weights = visits("weight", range(chunks - 1, -1, -1)) if split else []
    return list(_merge(forwards, backwards, weights, ahead, rank))


def _merge(
    forwards: list[Action], backwards: list[Action], weights: list[Action], ahead: int, behind: int
) -> Iterator[Action]:
    """`ahead` forwards; then one forward, one backward, and of the weights the one that is `behind` by so many."""
    yield from forwards[:ahead]
    for place, backward in enumerate(backwards):
        yield from forwards[ahead + place : ahead + place + 1]
        yield backward
        if weights and place >= behind:
            yield weights[place - behind]
    yield from weights[max(0, len(weights) - behind) :]


def run_actions(
    orders: list[list[Action]], num_stages: int, seconds: Callable[[Kind], float]
) -> tuple[tuple[Bar, ...], float]:
    """When each rank runs its actions, each as soon as what it needs is there, and when the last one ends.

    A forward needs that of the stage before; a backward its own forward and the backward of the stage behind. Messages
    take no time of their own.
    """
    done: dict[Action, float] = {}
    clock, places, bars = [0.0] * len(orders), [0] * len(orders), []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and all(n in done for n in _needs(order[places[rank]], num_stages)):
                action = order[places[rank]]
                start = max([clock[rank], *(done[needed] for needed in _needs(action, num_stages))])
                done[action] = clock[rank] = start + seconds(action.kind)
                bars.append(Bar(rank, action, start, clock[rank]))
                places[rank] += 1
                moved = True
    assert places == [len(order) for order in orders], "an order in which a rank waits for itself"
    return tuple(bars), max(clock)


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    if action.kind == "forward":
        if action.stage > 0:
            yield Action("forward", action.stage - 1, action.micro_step)
        return
    if action.kind == "weight":
        yield Action("backward", action.stage, action.micro_step)
        return
    yield Action("forward", action.stage, action.micro_step)
    if action.stage < num_stages - 1:
        yield Action("backward", action.stage + 1, action.micro_step)


def make_timeline(choice: Choice, time: StepTime, *, whole: bool = False) -> Timeline:
    """The step of a Choice; with `whole` all its micro-steps, however many they are.

    Seconds are those of the Estimate: of what a rank computes (and waits for messages of its micro-steps) a third is
    forwards and two thirds backwards, to which comes what is computed again.
    """
    layout = choice.layout
    shown = choice.micro_steps if whole else _num_shown(layout, choice.micro_steps)
    visits = choice.micro_steps * (layout.num_stages // layout.pp)
    forward = (time.compute + time.tensor + time.context + time.expert + time.pipeline) / 3 / visits
    backward = 2 * forward + time.recompute / visits
    split = layout.pp > 1 and layout.schedule in SPLIT and layout.fits_schedule(shown)
    lengths: dict[Kind, float] = {"forward": forward, "backward": backward - forward * split, "weight": forward}
    orders = [order_actions(layout, rank, shown) for rank in range(layout.pp)]
    bars, seconds = run_actions(orders, layout.num_stages, lengths.__getitem__)
    busy = shown * (layout.num_stages // layout.pp) * (forward + backward)
    causes = ("data", "optimizer", "input", "checkpoint", "offload")
    after = tuple((cause, getattr(time, cause)) for cause in causes if getattr(time, cause) > 0)
    return Timeline(bars, shown, choice.micro_steps, seconds, seconds - busy, after)


def _num_shown(layout: Layout, micro_steps: int) -> int:
    """Micro-steps that are drawn: all, or whole rounds of them that still show how the pipeline fills and drains."""
    room = ALONE if layout.pp == 1 else max(ROUNDS * layout.pp, 2 * layout.num_stages)
    return room if layout.fits_schedule(micro_steps) and micro_steps > room else micro_steps
