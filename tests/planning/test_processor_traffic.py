"""What is sent between processes of one processor: as gloo was measured, and never hidden."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster, Link
from allranks.layout import Layout
from allranks.model_profile import Operation
from allranks.plan import Choice
from allranks.planning.axis_traffic import axes_of, axis_traffic
from allranks.planning.data_traffic import DataCost
from allranks.planning.estimate import estimate
from allranks.planning.processor import passing_seconds
from allranks.planning.processor_traffic import on_processor, processor_data_cost
from allranks.planning.setting import Setting
from tests.planning.profiles import decoder
from tests.planning.test_processor import CPU

MB = 1e6
TABLE = ((1e3, 1e-4), (1e9, 1.0))  # about 1e-9 s a byte
LINK = Link(
    "loopback", 1e9, 1e-4,
    {
        "all_reduce": {2: TABLE}, "all_gather": {2: ((1e3, 2e-4), (1e9, 2.0))},
        "reduce_scatter": {2: ((1e3, 3e-4), (1e9, 3.0))}, "all_to_all": {2: ((1e3, 5e-4), (1e9, 5.0))},
        "send": {2: ((1e3, 7e-4), (1e9, 7.0))},
    },
)  # fmt: skip
WHERE = Cluster("local", 1, 2, CPU, LINK, LINK, 2)
P = 1e6


def cost(units: int = 4, **given: Any) -> DataCost:
    setting = on_processor(Setting(**{"global_batch": 8, "micro_batch": 4, "precision": "float32", **given}), WHERE)
    return processor_data_cost(setting, axes_of(WHERE, setting), P, 0.0, units)


def test_nothing_is_hidden() -> None:
    setting = on_processor(Setting(8, 4, dp=2), WHERE)
    how = setting.mechanisms
    assert (how.overlap_data, how.overlap_tensor, how.overlap_pipeline, how.dispatch_seconds) == (0.0, 0.0, 0.0, 0.0)
    gpu = replace(WHERE, device=replace(CPU, name="h100"))
    assert on_processor(Setting(8, 4), gpu).mechanisms.overlap_data > 0


def test_copies_reduce_as_gloo_was_measured() -> None:
    found = cost(dp=2)
    assert found.exposed == found.seconds == pytest.approx(4e-3 + passing_seconds(CPU, 8e6, 4), rel=0.03)
    assert found.update == pytest.approx(P / 1e9 + 3 * 4 * P / 1e10 + 10 * 4e-6)


def test_the_update_of_shards_is_shorter_and_one_process_sends_nothing() -> None:
    assert cost(dp=2, shard=2, zero=1).update < 0.6 * cost(dp=2).update
    assert cost(dp=1).seconds == 0.0 and cost(dp=1).update == cost(dp=2).update
    assert cost(dp=1, frozen=True).update == 0.0


@pytest.mark.parametrize(
    ("given", "gathers", "reductions"),
    [
        ({"zero": 1}, 1, 1),
        ({"zero": 3}, 2, 1),
        ({"zero": 3, "micro_batch": 2}, 4, 2),
        ({"zero": 3, "micro_batch": 2, "keeps_gathered": True}, 2, 2),
        ({"zero": 1, "micro_batch": 2}, 1, 1),
    ],
)
def test_shards_are_gathered_and_reduced_by_units_and_copied(
    given: dict[str, Any], gathers: int, reductions: int
) -> None:
    gather = 4 * (2.198e-3 + passing_seconds(CPU, 2 * 1e6 * 1.5, 2))
    reduce = 4 * (3.297e-3 + passing_seconds(CPU, 2 * 1e6, 1))
    found = cost(dp=2, shard=2, **given)
    assert found.seconds == pytest.approx(gathers * gather + reductions * reduce, rel=2e-3)
    assert found.seconds == found.exposed and found.count == 4 * (gathers + reductions)


@pytest.mark.parametrize(
    ("ring", "seconds"), [(False, 2 * 4 * (5e-4 + 5e-9 * 131072)), (True, 3 * (2e-4 + 2e-9 * 2 * 262144))]
)
def test_sequences_are_swapped_or_go_around_at_the_width_of_their_type(ring: bool, seconds: float) -> None:
    setting = on_processor(Setting(8, 8, cp=2, precision="float32", ring=ring), WHERE)
    block = replace(decoder().blocks[0], operations=(Operation("attention", "attention", shape=(128, 128, 8, 8, 8)),))
    found = axis_traffic(block, setting, axes_of(WHERE, setting)).context
    assert found == pytest.approx(seconds, rel=0.01)


def test_a_plan_asks_it() -> None:
    profile = decoder()
    ddp = estimate(profile, WHERE, Choice(Layout(dp_replicate=2), 8, 4, "float32"))
    assert ddp.time.data > 1e-9 * 4 * profile.parameters
    pipeline = estimate(profile, WHERE, Choice(Layout(pp=2), 8, 4, "float32"))
    assert pipeline.time.pipeline >= 4 * 7e-4
