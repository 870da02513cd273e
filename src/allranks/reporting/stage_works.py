"""What those stages of a pipeline do of which no rank was rehearsed: the nearest one's work, in an order of their own.

Each forward and backward of a micro-step is the nearest rank's, at the place where the schedule has it on this one.
What goes to the stages beside it is its own, in the bytes with which those begin.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from allranks.layout import Layout
from allranks.plan import Estimate
from allranks.rehearsal import Part, RankRehearsal, Rehearsal, Work
from allranks.reporting.timeline import Action, order_actions

PASSES = ("forward", "backward")


@final
@dataclass(frozen=True, slots=True)
class Drawn:
    """A place along pp of which no rank was rehearsed.

    Attributes:
        place: which; source: the rank whose work it has.
        told: what one of its ranks would do.
    """

    place: int
    source: int
    told: RankRehearsal


def draw_others(told: Rehearsal, estimate: Estimate) -> Iterator[Drawn]:
    """The places along pp that no rehearsed rank is at, in order."""
    layout, number = estimate.choice.layout, estimate.choice.micro_steps
    known: dict[int, RankRehearsal] = {}
    for rank in told.ranks.values():
        known.setdefault(layout.stage_rank(rank.stage), rank)
    ends = 0, layout.pp - 1
    for place in (place for place in range(layout.pp) if place not in known):
        # Of two that are as near the one inside: embedding and head are at the ends.
        near = min(known, key=lambda one: (abs(one - place), one in ends))
        order, wanted = (
            [action for action in order_actions(layout, at, number) if action.kind in PASSES] for at in (near, place)
        )
        works = tuple(_reordered(known[near].works, order, wanted, layout, place, told.between_stages))
        yield Drawn(place, known[near].rank, replace(known[near], stage=place, works=works))


def _reordered(
    works: Sequence[Work],
    order: Sequence[Action],
    wanted: Sequence[Action],
    layout: Layout,
    place: int,
    between: Mapping[int, tuple[int, int]],
) -> Iterator[Work]:
    """`works`, done in `order`, as the rank at `place` does them; as they are where they are no such order."""
    before, passes, behind = _cut(works)
    stages = [(place, one) for one in passes]
    if [one[0].phase for one in passes] == [action.kind for action in order]:
        by_action = {_key(action, layout): one for action, one in zip(order, passes, strict=True)}
        stages = [(action.stage, by_action[_key(action, layout)]) for action in wanted]
    yield from before
    turn = max((work.turn for work in before), default=0)
    for stage, one in stages:
        turn += 1
        first, last = _messages(one[0].phase, stage, layout, between)
        yield Work(one[0].phase, "", first, turn=turn)
        yield from (replace(work, turn=turn) for work in one)
        yield Work(one[0].phase, "", last, turn=turn)
    yield from (replace(work, turn=turn + 1) for work in behind)


def _key(action: Action, layout: Layout) -> tuple[str, int, int]:
    """The same of each rank for what is as far in its schedule: pass, which of its stages, micro-step."""
    return action.kind, action.stage // layout.pp, action.micro_step


def _cut(works: Sequence[Work]) -> tuple[list[Work], list[list[Work]], list[Work]]:
    """What comes before all passes, each pass, and what comes behind, without what goes to other stages."""
    before, passes, behind = list[Work](), list[list[Work]](), list[Work]()
    for whole in works:
        work = replace(whole, parts=tuple(part for part in whole.parts if not _is_between(part)))
        if passes and work.turn == passes[-1][0].turn:
            passes[-1].append(work)
        elif work.phase in PASSES:
            passes.append([work])
        elif work.parts:
            (behind if passes else before).append(work)
    return before, passes, behind


def _is_between(part: Part) -> bool:
    return part.message is not None and part.message[0] == "pp" and part.message[1] in ("send", "receive")


def _messages(
    phase: str, stage: int, layout: Layout, between: Mapping[int, tuple[int, int]]
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """What a stage receives before a pass, and what it sends behind it; nothing of stages of its own rank."""
    onward = phase == "forward"
    came, goes = (stage, stage + 1) if onward else (stage + 1, stage)

    def message(op: str, to: int) -> tuple[Part, ...]:
        inside = 0 < to < layout.num_stages and layout.stage_rank(to) != layout.stage_rank(to - 1)
        if not inside or not between:
            return ()
        known = between[min(between, key=lambda one: abs(one - to))]
        num_bytes = known[0] if onward else known[1]
        return (Part(message=("pp", op, num_bytes)),) if num_bytes else ()

    return message("receive", came), message("send", goes)
