"""A stage that was not rehearsed has the nearest one's work, in its own order, and messages of its own."""

from collections import Counter
from dataclasses import replace

import pytest

from allranks.layout import Layout
from allranks.plan import Estimate
from allranks.rehearsal import Part, RankRehearsal, Work
from allranks.reporting.stage_works import Drawn, draw_others
from allranks.reporting.timeline import order_actions
from tests.reporting.test_step_order import done, planned, turns_of
from tests.test_rehearsal import rehearsal

GATHER = Part(message=("dp_shard", "all-gather", 1000), unit="layers.0")
BETWEEN = {1: (100, 90), 2: (40, 30), 3: (20, 0)}
NORM = Work("update", "", (Part(message=("pp", "all-reduce", 4)),), turn=10_000)
SCHEDULES = ["1f1b", "gpipe", "interleaved", "looped_bfs", "zbv"]


def rank(found: Estimate, number: int, place: int) -> RankRehearsal:
    """One at a place along pp, each of whose passes gathers, receives from anywhere, and sums up at the end."""
    turns = [work for work in turns_of(found, place) if work.phase != "weight"]
    came = Part(message=("pp", "receive", 7))
    works = (Work("start", "", (came,)), *(replace(work, parts=(GATHER, came, *work.parts)) for work in turns), NORM)
    return replace(done(works, place), rank=number)


def drawn(found: Estimate, *places: int) -> list[Drawn]:
    told = rehearsal(*(rank(found, 16 * place, place) for place in places))
    return list(draw_others(replace(told, between_stages=BETWEEN), found))


def messages(one: Drawn) -> Counter[tuple[str, str, str, int]]:
    return Counter(
        (work.phase, *part.message) for work in one.told.works for part in work.parts if part.message is not None
    )


def test_each_has_the_work_of_the_nearest() -> None:
    found = planned(Layout(pp=8, dp_shard=8), 64)
    told = [(one.place, one.source) for one in drawn(found, 0, 4, 7)]
    assert told == [(1, 0), (2, 64), (3, 64), (5, 64), (6, 112)], "of two that are as near the one inside"
    assert all(one.told.stage == one.place for one in drawn(found, 0, 4, 7))
    assert drawn(found, *range(8)) == [] and drawn(planned(Layout(dp_shard=64), 64), 0) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_done_is_in_its_own_order(schedule: str) -> None:
    found = planned(Layout(pp=4, dp_shard=2, tp=8, schedule=schedule), 64)
    layout, number = found.choice.layout, found.choice.micro_steps
    for one in drawn(found, 0):
        turns = dict.fromkeys((work.turn, work.phase) for work in one.told.works if work.phase != "update")
        wanted = [a.kind for a in order_actions(layout, one.place, number) if a.kind != "weight"]
        assert [phase for _, phase in turns] == wanted
        assert [turn for turn, _ in turns] == sorted({turn for turn, _ in turns})
        assert sum(part.flops for work in one.told.works for part in work.parts) == one.told.flops


def test_messages_are_its_own_and_those_of_the_data_axes_the_nearest_ones() -> None:
    found = planned(Layout(pp=4, dp_shard=2, tp=8), 64)
    number = found.choice.micro_steps
    first, second, last = drawn(found, 0)
    data = {(phase, "dp_shard", "all-gather", 1000): number for phase in ("forward", "backward")}
    common = {**data, ("update", "pp", "all-reduce", 4): 1}
    assert messages(first) == common | {
        ("forward", "pp", "receive", 100): number,
        ("forward", "pp", "send", 40): number,
        ("backward", "pp", "receive", 30): number,
        ("backward", "pp", "send", 90): number,
    }
    assert messages(second) == common | {
        ("forward", "pp", "receive", 40): number,
        ("forward", "pp", "send", 20): number,
        ("backward", "pp", "send", 30): number,
    }, "the last stage has no gradient to send back"
    assert messages(last) == common | {("forward", "pp", "receive", 20): number}
    phases = [(work.phase, part.message[1]) for work in first.told.works for part in work.parts if part.message]
    assert phases[:3] == [("forward", "receive"), ("forward", "all-gather"), ("forward", "send")]


def test_the_first_stage_receives_no_activations() -> None:
    (first,) = (one for one in drawn(planned(Layout(pp=4, dp_shard=2, tp=8), 64), 1, 2, 3) if one.place == 0)
    told = {(phase, op) for phase, axis, op, _ in messages(first) if axis == "pp"}
    assert told == {("forward", "send"), ("backward", "receive"), ("update", "all-reduce")}


def test_two_stages_of_one_rank_send_each_other_nothing() -> None:
    """There and back: the last rank's second stage follows its first one."""
    found = planned(Layout(pp=4, dp_shard=2, tp=8, schedule="zbv"), 64)
    last = drawn(found, 0)[-1]
    sent = {(phase, op): count for (phase, axis, op, _), count in messages(last).items() if axis == "pp"}
    number = found.choice.micro_steps
    assert sent[("forward", "send")] == sent[("forward", "receive")] == number


def test_work_in_another_order_than_the_schedules_stays_as_it_is() -> None:
    found = planned(Layout(pp=4, dp_shard=2, tp=8), 64)
    odd = done((Work("forward", "", (Part(flops=1.0),), turn=1), Work("backward", "", (Part(flops=2.0),), turn=2)))
    (one, *_) = draw_others(replace(rehearsal(odd), between_stages={}), found)
    assert [(work.phase, part.flops) for work in one.told.works for part in work.parts] == [
        ("forward", 1.0),
        ("backward", 2.0),
    ]
