"""The order that the page draws is torch's, and the times keep what depends on what."""

import itertools
from dataclasses import fields
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from allranks.layout import Layout
from allranks.parallel.stage_schedule import CLASSES
from allranks.plan import Choice, StepTime
from allranks.reporting.timeline import SPLIT, Action, make_timeline, order_actions, run_actions

TIME = StepTime(compute=3.0, optimizer=0.25, data=0.5, bubble=9.0)
LETTERS = {"forward": "FORWARD", "backward": "FULL_BACKWARD", "weight": "BACKWARD_WEIGHT"}


def torchs_order(schedule: str, pp: int, num_micro_steps: int) -> dict[int, list[tuple[str, int, int]]]:
    """What torch's class lays down before it talks to anyone; its constructor wants live stages."""
    kind = schedules.get_schedule_class(CLASSES[schedule])
    made: Any = kind.__new__(kind)
    chunks = Layout(pp=pp, schedule=schedule).num_stages // pp
    rounds = max(1, num_micro_steps // pp)
    made.__dict__.update(
        _n_microbatches=num_micro_steps, pp_group_size=pp, n_local_stages=chunks, _num_stages=chunks * pp,
        num_stages=chunks * pp,
        number_of_rounds=rounds, microbatches_per_round=num_micro_steps // rounds, _stages=[None] * chunks,
    )  # fmt: skip
    if chunks == 1:
        orders = made._get_pipeline_order()
    else:
        orders = {rank: made._calculate_single_rank_operations(rank) for rank in range(pp)}
    return {rank: [word for action in order for word in words(action)] for rank, order in orders.items()}


def words(action: Any) -> list[tuple[str, int, int]]:
    """The computations of an action: those that run together one by one, none of what is no computation."""
    if action is None:
        return []
    if action.sub_actions:
        return [word for part in action.sub_actions for word in words(part)]
    if action.microbatch_index is None:
        return []
    return [(action.computation_type.name, action.stage_index, action.microbatch_index)]


def halves(order: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """With both halves of a whole backward one after the other, as they are drawn where others are split."""
    parts = {"FULL_BACKWARD": ("BACKWARD_INPUT", "BACKWARD_WEIGHT")}
    return [(part, stage, number) for kind, stage, number in order for part in parts.get(kind, (kind,))]


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize(("pp", "num_micro_steps"), [(2, 4), (4, 8), (3, 9), (4, 16), (1 + 4, 10), (6, 18), (7, 14)])
def test_the_order_is_torchs(schedule: str, pp: int, num_micro_steps: int) -> None:
    layout = Layout(pp=pp, schedule=schedule)
    letters = LETTERS | ({"backward": "BACKWARD_INPUT"} if schedule in SPLIT else {})
    theirs = torchs_order(schedule, pp, num_micro_steps)
    if schedule == "1f1b":
        # torch 2.13 draws the last rank's forwards one number too high (it runs them from 0 on).
        theirs[pp - 1] = [(kind, stage, n - (kind == "FORWARD")) for kind, stage, n in theirs[pp - 1]]
    for rank, order in theirs.items():
        ours = order_actions(layout, rank, num_micro_steps)
        expected = halves(order) if schedule in SPLIT else order
        assert [(letters[a.kind], a.stage, a.micro_step) for a in ours] == expected


@pytest.mark.parametrize("schedule", CLASSES)
def test_micro_steps_that_do_not_fit_go_through_in_turn(schedule: str) -> None:
    layout = Layout(pp=4, schedule=schedule)
    assert not layout.fits_schedule(3)
    kinds = [action.kind for action in order_actions(layout, 1, 3)]
    num_stages = layout.num_stages // 4
    assert kinds[: 3 * num_stages] == ["forward"] * 3 * num_stages
    assert kinds.count("backward") == 3 * num_stages


def test_one_device_runs_each_backward_behind_its_forward() -> None:
    order = order_actions(Layout(schedule="gpipe"), 0, 2)
    assert [(a.kind, a.micro_step) for a in order] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]


@pytest.mark.parametrize("schedule", CLASSES)
def test_no_action_starts_before_what_it_needs(schedule: str) -> None:
    layout = Layout(pp=4, schedule=schedule)
    orders = [order_actions(layout, rank, 8) for rank in range(4)]
    bars, seconds = run_actions(orders, layout.num_stages, lambda kind: 1.0 if kind == "forward" else 2.0)
    ends = {bar.action: bar.end for bar in bars}
    assert len(ends) == sum(map(len, orders)) and max(ends.values()) == seconds
    for bar in bars:
        stage, number = bar.action.stage, bar.action.micro_step
        assert layout.stage_rank(stage) == bar.rank
        needed = {
            "forward": [("forward", stage - 1)] if stage else [],
            "backward": [("forward", stage)] + ([("backward", stage + 1)] if stage < layout.num_stages - 1 else []),
            "weight": [("backward", stage)],
        }[bar.action.kind]
        assert all(ends[Action(kind, at, number)] <= bar.start for kind, at in needed)  # type: ignore[arg-type]
    for rank in range(4):
        mine = sorted((bar.start, bar.end) for bar in bars if bar.rank == rank)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(mine))


def timeline(schedule: str, micro_steps: int, pp: int = 4, time: StepTime = TIME) -> Any:
    layout = Layout(pp=pp, schedule=schedule)
    return make_timeline(Choice(layout, micro_steps, 1), time)


def test_the_bubble_is_the_published_one() -> None:
    """(pp - 1)(F + B), over the chunks where stages are interleaved: 2104.04473, sections 2.2.1 and 2.2.2."""
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        assert timeline(schedule, 8).idle == pytest.approx(3 * (3.0 / 8) / chunks)


def test_zero_bubble_waits_less() -> None:
    assert timeline("interleaved_zb", 8).idle < timeline("interleaved", 8).idle


@pytest.mark.parametrize("schedule", CLASSES)
def test_a_short_picture_waits_as_long_as_the_whole_step(schedule: str) -> None:
    time = StepTime(compute=32.0)
    short, layout = timeline(schedule, 32, time=time), Layout(pp=4, schedule=schedule)
    assert (short.shown, short.micro_steps) == (16, 32)
    orders = [order_actions(layout, rank, 32) for rank in range(4)]
    chunks = layout.num_stages // 4
    lengths = {"forward": 1 / 3 / chunks, "backward": 2 / 3 / chunks, "weight": 1 / 3 / chunks}
    if schedule in SPLIT:
        lengths["backward"] = 1 / 3 / chunks
    _, seconds = run_actions(orders, layout.num_stages, lambda kind: lengths[kind])
    assert seconds - 32.0 == pytest.approx(short.idle)


def test_every_second_of_the_estimate_is_drawn() -> None:
    names = [part.name for part in fields(StepTime)]
    time = StepTime(**{name: float(place + 1) for place, name in enumerate(names)})
    found = timeline("1f1b", 4, pp=1, time=time)
    assert found.seconds + sum(seconds for _, seconds in found.after) == pytest.approx(time.total - time.bubble)
    besides = ("data", "optimizer", "input", "checkpoint", "offload")
    assert dict(found.after) == {name: getattr(time, name) for name in besides}


def test_what_is_computed_again_belongs_to_the_backward() -> None:
    found = timeline("1f1b", 4, pp=1, time=StepTime(compute=3.0, recompute=1.0))
    lengths = {bar.action.kind: bar.end - bar.start for bar in found.bars}
    assert lengths == {"forward": pytest.approx(0.25), "backward": pytest.approx(0.75)}


@pytest.mark.parametrize("schedule", SPLIT)
def test_every_micro_step_is_as_long_as_it_takes(schedule: str) -> None:
    """Split or not, in the schedule's order or, where the micro-steps do not fit it, in turn."""
    for micro_steps in (16, 3):
        found = timeline(schedule, micro_steps)
        drawn = sum(bar.end - bar.start for bar in found.bars)
        assert drawn == pytest.approx(4 * TIME.compute * found.shown / micro_steps)
