"""The hand-written pipeline is the hand-written loop on one process."""

from functools import partial

import pytest
import torch

from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.raw_pipeline import SCHEDULES, StageModule, cut_layers, own_stages
from allranks.benchmarking.subject import Subject, make_model, samples_a_step
from allranks.layout import Layout
from allranks.layout_refusals import SPLIT_BACKWARD
from allranks.parallel.precision import choose_precision
from allranks.parallel.stage_plan import plan_stages
from allranks.stepping.stage_cost import count_between
from tests.benchmarking.plain_loop import plain_losses
from tests.distributed.pool import Pools

THERE_AND_BACK = ("zbv", "dualpipev")
GREETS = torch.__version__ < "2.13"
"""Whether a stage greets both of its neighbours, as torch 2.11's: over gloo no rank can send to itself, as in a V."""


def test_the_stages_together_are_the_model() -> None:
    torch.manual_seed(0)
    model = make_model("tiny")
    tokens = torch.arange(32).view(2, 16)
    value = tokens
    for stage in range(2):
        value = StageModule(model, stage, [0, 2])(value)
    assert torch.equal(value, model(tokens))


def losses(schedule: str) -> list[float]:
    """In a worker: of twenty steps."""
    found = raw_steps(Layout(pp=2, schedule=schedule), "tiny", 20, 0, torch.device("cpu"))
    return [told() for told in found]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "schedule", [one if one in ("1f1b", "zbv") else pytest.param(one, marks=pytest.mark.full) for one in SCHEDULES]
)
def test_it_learns_and_tells_every_rank(pool: Pools, schedule: str) -> None:
    if GREETS and schedule in THERE_AND_BACK:
        pytest.skip("torch 2.11's own stages cannot go there and back over gloo")
    first, second = pool(2).run(losses, schedule)
    assert first == second and len(first) == 20
    assert 5.4 < first[0] < 5.7 and sum(first[-5:]) < sum(first[:5])


def test_stages_are_dealt_in_turn_or_there_and_back() -> None:
    assert [own_stages(Layout(pp=4), rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [own_stages(Layout(pp=2, schedule="interleaved"), rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [own_stages(Layout(pp=2, schedule="zbv"), rank) for rank in range(2)] == [[0, 3], [1, 2]]


def test_it_is_cut_where_ours_is() -> None:
    task, model = Subject(), make_model("10m")
    count = partial(count_between, task, task.dataset("train"), 0, choose_precision("float32", None, "cpu"))
    for layout in (Layout(pp=4), *(Layout(pp=2, schedule=schedule) for schedule in SCHEDULES)):
        plan = plan_stages(model, layout.stage_ranks, count=count)
        ours = [0, *(int(point.removeprefix("layers.")) for point in plan.points)]
        assert plan.balanced == "balanced by operations" and cut_layers(model, layout) == ours, layout
    assert cut_layers(model, Layout(pp=4)) == [0, 1, 3, 5]  # the head goes with one layer


@pytest.mark.full
@pytest.mark.distributed
def test_every_schedule_makes_the_same_steps(pool: Pools) -> None:
    """Those of one process with the same samples: only who computes what and when differs."""

    def case() -> list[list[float]]:
        kept = []
        for schedule in [one for one in SCHEDULES if not (GREETS and one in THERE_AND_BACK)]:
            layout = Layout(pp=2, schedule=schedule)
            kept.append([told() for told in raw_steps(layout, "tiny", 4, 0, torch.device("cpu"))])
        return kept

    first, *others = pool(2).run(case)[0]
    for other in others:
        assert other == pytest.approx(first, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
@pytest.mark.parametrize(
    "schedule", [one if one == "1f1b" else pytest.param(one, marks=pytest.mark.full) for one in SCHEDULES]
)
def test_beside_a_data_axis_it_learns_what_one_process_learns(pool: Pools, schedule: str, axis: str) -> None:
    if axis == "dp_shard" and schedule in SPLIT_BACKWARD:
        pytest.skip("refused: FSDP2 cannot follow")
    if GREETS and schedule in THERE_AND_BACK:
        pytest.skip("torch 2.11's own stages cannot go there and back over gloo")
    layout = Layout(pp=2, schedule=schedule, **{axis: 2})  # type: ignore[arg-type]

    def case() -> list[float]:
        return [told() for told in raw_steps(layout, "tiny", 4, 0, torch.device("cpu"))]

    expected = plain_losses(4, samples_a_step(layout))
    for found in pool(4).run(case):
        assert found == pytest.approx(expected, rel=1e-5)
