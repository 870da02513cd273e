"""A rank's predicted step: what waits for what, and that it ends when the Estimate's step does."""

from dataclasses import replace
from itertools import pairwise

import pytest

from allranks.layout import Layout
from allranks.named_models import find_model
from allranks.plan import Choice, Estimate, StepTime
from allranks.planning.estimate import estimate
from allranks.planning.hardware import find_cluster
from allranks.rehearsal import Part, RankRehearsal, Work
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from allranks.reporting.step_order import COMPUTE, RankStep, Span, order_rank
from allranks.reporting.timeline import make_timeline
from tests.test_rehearsal import rank

WAIT = Part()


def gather(block: str) -> Part:
    return Part(message=("dp_shard", "all-gather", 1000), unit=block)


def fsdp(layers: int, micro_steps: int = 1) -> tuple[Work, ...]:
    """Blocks that are gathered before they compute, and ahead in the backward, as FSDP2 does it."""
    found = []
    for micro_step in range(micro_steps):
        blocks = [f"layers.{n}" for n in range(layers)]
        turn = 2 * micro_step + 1
        tp = Part(message=("tp", "all-reduce", 500))
        found += [Work("forward", b, (gather(b), WAIT, Part(flops=1e12), tp), turn=turn) for b in blocks]
        found.append(Work("backward", "", (gather(blocks[-1]), WAIT), turn=turn + 1))
        for place, block in reversed(list(enumerate(blocks))):
            ahead = (gather(blocks[place - 1]),) if place else ()
            reduce = Part(message=("dp_shard", "reduce-scatter", 2000))
            found.append(
                Work(
                    "backward", block, (*ahead, Part(flops=2e12), reduce, WAIT)[: None if place else -1], turn=turn + 1
                )
            )
    return tuple(found)


def done(works: tuple[Work, ...], stage: int = 0) -> RankRehearsal:
    """A rank that did this."""
    flops = sum(part.flops * work.times for work in works for part in work.parts)
    return replace(rank(), works=works, flops=flops, stage=stage)


def planned(layout: Layout, batch: int = 64, model: str = "llama3-8b", cluster: str = "8x8:a100-80g") -> Estimate:
    return estimate(find_model(model).profile(), find_cluster(cluster), Choice(layout, batch, 1))


def on(step: RankStep, track: str) -> list[Span]:
    return [span for span in step.spans if span.track == track]


def check(step: RankStep, found: Estimate) -> None:
    """Nothing overlaps on its track, and the last thing ends with the step."""
    for track in {span.track for span in step.spans}:
        spans = on(step, track)
        assert all(before.end <= after.start for before, after in pairwise(spans)), track
    assert max(span.end for span in step.spans) == pytest.approx(found.step_seconds.expected, abs=2e-9)


LAYOUTS = [
    (Layout(dp_shard=64), 512),
    (Layout(dp_shard=8, tp=8), 64),
    (Layout(dp_replicate=8, dp_shard=8), 64),
    (Layout(pp=4, dp_shard=2, tp=8), 64),
    (Layout(dp_shard=64, recompute="full", offload="activations"), 64),
]


@pytest.mark.parametrize(("layout", "batch"), LAYOUTS)
def test_it_ends_when_the_estimates_step_does(layout: Layout, batch: int) -> None:
    found = planned(layout, batch)
    for works in (fsdp(32, found.choice.micro_steps), fsdp(2), (Work("forward", "", (Part(flops=1.0),)),), ()):
        check(order_rank(done(works), found), found)


def test_a_rank_computes_and_sends_as_long_as_the_estimate_says() -> None:
    found = planned(Layout(dp_shard=8, tp=8))
    step, time = order_rank(done(fsdp(32)), found), found.time
    own = {span.name: span.end - span.start for span in on(step, COMPUTE) if not span.args}
    computing = sum(span.end - span.start for span in on(step, COMPUTE) if span.args)
    assert computing == pytest.approx(time.compute + time.recompute) and own["optimizer"] == pytest.approx(
        time.optimizer
    )
    rows = {row.axis: row.seconds for row in found.traffic}
    assert sum(span.end - span.start for span in on(step, "tp")) == pytest.approx(rows["tp"])
    assert sum(span.end - span.start for span in on(step, "dp_shard")) == pytest.approx(rows["dp"] * step.shortened)


def test_messages_of_the_data_axes_are_shortened_where_they_would_stop_more_than_the_estimate_says() -> None:
    """And where they stop less, the rest is a bar of its own."""
    found = planned(Layout(dp_shard=64), 512)
    works = done(fsdp(32))
    data = next(row.seconds for row in found.traffic)
    for exposed in (0.01 * data, 0.5 * data, 2 * data):
        less = replace(found.time, data=exposed)
        changed = replace(found, time=less, step_seconds=replace(found.step_seconds, expected=less.total))
        step = order_rank(works, changed)
        check(step, changed)
        assert (step.shortened < 1) != any(span.name == "other waits" for span in step.spans)
    assert step.shortened == 1


def test_a_block_waits_for_its_own_gather_and_the_next_one_is_behind_its_compute() -> None:
    found = planned(Layout(dp_shard=64), 512)
    step = order_rank(done(fsdp(4)), found)
    gathers = [span for span in on(step, "dp_shard") if span.name == "all-gather"]
    computing = [span for span in on(step, COMPUTE) if "flops" in span.args]
    assert [span.args["for"] for span in gathers[:4]] == [f"layers.{n}" for n in range(4)]
    for block, (asked, compute) in enumerate(zip(gathers[:4], computing[:4], strict=True)):
        assert compute.name == f"forward layers.{block}" and asked.end <= compute.start
    for asked, before in zip(gathers[1:4], computing[:3], strict=True):
        assert asked.start == before.start  # one ahead
    # In the backward, too: gathers 4 to 7 are of layers 3 to 0.
    for asked, compute in zip(gathers[4:], computing[4:], strict=True):
        assert compute.name == f"backward {asked.args['for']}" and asked.end <= compute.start
    assert gathers[5].start < computing[4].end


def test_what_is_reduced_goes_behind_the_backward_that_made_it() -> None:
    found = planned(Layout(dp_shard=64), 512)
    step = order_rank(done(fsdp(4)), found)
    reduced = [span for span in on(step, "dp_shard") if span.name == "reduce-scatter"]
    made = [span for span in on(step, COMPUTE) if span.name.startswith("backward")]
    assert all(one.start >= backward.end for one, backward in zip(reduced, made, strict=True))
    assert reduced[0].start < made[1].end, "and beside the next one"
    (update,) = (span for span in on(step, COMPUTE) if span.name == "optimizer")
    assert update.start >= reduced[-1].end


def test_messages_of_tp_stop_the_computation() -> None:
    step = order_rank(done(fsdp(4)), planned(Layout(dp_shard=8, tp=8)))
    first, second = on(step, COMPUTE)[:2]
    reduce = on(step, "tp")[0]
    assert reduce.start == first.end and second.start >= reduce.end


def test_several_messages_of_one_unit_are_waited_for_together() -> None:
    found = planned(Layout(dp_shard=64), 512)
    works = (Work("forward", "layers.0", (gather("layers.0"), gather("layers.0"), WAIT, Part(flops=1e12)), turn=1),)
    step = order_rank(done(works), found)
    assert on(step, COMPUTE)[0].start == on(step, "dp_shard")[1].end


def test_messages_of_experts_have_a_track_and_so_has_what_their_copies_sum() -> None:
    messages = (
        ("ep", "all-to-all", 1000),
        ("dp_replicate", "all-reduce", 3000),
        (COPIES_OF_EXPERTS, "all-reduce", 1000),
    )
    parts = tuple(Part(message=message) for message in messages)
    found = planned(Layout(dp_replicate=8, ep=4), 64, "mixtral-8x7b", "1x8:h200")
    step = order_rank(done((Work("backward", "layers.1", (Part(flops=2e12), *parts), turn=1),)), found)
    check(step, found)
    rows = {row.axis: row.seconds for row in found.traffic}
    assert {
        track: spans[0].end - spans[0].start
        for track in ("ep", "dp_replicate", COPIES_OF_EXPERTS)
        if (spans := on(step, track))
    } == {
        "ep": pytest.approx(rows["ep"]),
        "dp_replicate": pytest.approx(rows["dp"] * step.shortened),
        COPIES_OF_EXPERTS: pytest.approx(rows[COPIES_OF_EXPERTS] * step.shortened),
    }


def turns_of(found: Estimate, stage: int) -> tuple[Work, ...]:
    """What a rank of the stage does by its schedule."""
    bars = sorted(
        (b for b in make_timeline(found.choice, found.time, whole=True).bars if b.rank == stage), key=lambda b: b.start
    )
    return tuple(
        Work(bar.action.kind, "layers.0", (Part(flops=1e12),), turn=place) for place, bar in enumerate(bars, 1)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_bubbles_are_where_the_schedule_has_them(schedule: str) -> None:
    found = planned(Layout(pp=4, dp_shard=2, tp=8, schedule=schedule), 64)
    assert found.time.bubble > 0
    for stage in range(4):
        step = order_rank(done(turns_of(found, stage), stage), found)
        check(step, found)
        bubbles = [span for span in on(step, COMPUTE) if span.name == "bubble"]
        assert sum(span.end - span.start for span in bubbles) == pytest.approx(found.time.bubble)
        assert bool(bubbles[0].start) == (stage == 0), "all but the first stage wait before they begin"


def test_turns_that_are_not_the_schedules_have_their_bubble_behind_them() -> None:
    found = planned(Layout(pp=4, dp_shard=2, tp=8), 64)
    step = order_rank(done(fsdp(4)), found)
    check(step, found)
    (bubble,) = (span for span in on(step, COMPUTE) if span.name == "bubble")
    assert bubble.end - bubble.start == pytest.approx(found.time.bubble)
    assert all(span.end <= bubble.start for span in on(step, COMPUTE) if "flops" in span.args)


def test_what_a_dry_run_does_not_do_follows() -> None:
    found = planned(Layout(dp_shard=64), 512)
    time = StepTime(compute=1.0, data=0.5, optimizer=0.1, offload=0.2, input=0.3, checkpoint=0.4)
    found = replace(found, time=time, step_seconds=replace(found.step_seconds, expected=time.total))
    step = order_rank(done(fsdp(4)), found)
    check(step, found)
    assert [span.name for span in on(step, COMPUTE)][-4:] == ["optimizer", "offload", "input", "checkpoint"]


def test_under_hsdp_each_data_axis_sends_as_long_as_its_own_row() -> None:
    messages = (("dp_shard", "reduce-scatter", 6000), ("dp_replicate", "all-reduce", 1000))
    parts = tuple(Part(message=message) for message in messages)
    found = planned(Layout(dp_replicate=8, dp_shard=8))
    step = order_rank(done((Work("backward", "layers.1", (Part(flops=2e12), *parts), turn=1),)), found)
    rows = {row.axis: row.seconds for row in found.traffic}
    for axis, _, _ in messages:
        (span,) = on(step, axis)
        assert span.end - span.start == pytest.approx(rows[axis] * step.shortened)
