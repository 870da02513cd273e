"""What is sent between processes of one processor: as gloo was measured, and never hidden."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster, FixedSeconds, Link
from allranks.layout import Layout
from allranks.model_profile import Operation
from allranks.plan import Choice, StepTime
from allranks.planning.axis_traffic import axes_of, axis_traffic
from allranks.planning.block_cost import Parameters
from allranks.planning.data_traffic import DataCost
from allranks.planning.estimate import estimate
from allranks.planning.mechanisms import Mechanisms
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
    setting = on_processor(
        Setting(**{"global_batch": 8, "micro_batch": 4, "precision": "float32", **given}), WHERE, decoder()
    )
    return processor_data_cost(setting, axes_of(WHERE, setting), Parameters(P, 0.0, P, 0.0), units)


def test_nothing_is_hidden() -> None:
    setting = on_processor(Setting(8, 4, dp=2), WHERE, decoder())
    how = setting.mechanisms
    assert (how.overlap_data, how.overlap_tensor, how.overlap_pipeline, how.dispatch_seconds) == (0.0, 0.0, 0.0, 0.0)
    gpu = replace(WHERE, device=replace(CPU, name="h100"))
    assert on_processor(Setting(8, 4), gpu, decoder()).mechanisms.overlap_data > 0


def test_copies_reduce_as_gloo_was_measured() -> None:
    found = cost(dp=2)
    assert found.exposed == found.seconds == pytest.approx(4e-3 + passing_seconds(CPU, 8e6, 4), rel=0.03)
    assert found.update == pytest.approx(P / 1e9 + 3 * 4 * P / 1e10 + 10 * 4e-6)


def test_the_update_of_shards_is_shorter_and_one_process_sends_nothing() -> None:
    assert cost(dp=2, shard=2, zero=1).update < 0.6 * cost(dp=2).update
    assert cost(dp=1).seconds == 0.0 and cost(dp=1).update == cost(dp=2).update
    assert cost(dp=1, frozen=True).update == 0.0


def test_a_sharded_optimizer_of_ours_sums_everything_everywhere() -> None:
    copied = cost(dp=2, shard=1)
    gather = 4 * (2.198e-3 + passing_seconds(CPU, 2 * 1e6 * 1.5, 2))
    found = cost(mechanisms=Mechanisms(reduces_to_all=True), dp=2, shard=2, zero=1)
    assert found.seconds == found.exposed == pytest.approx(copied.seconds + gather, rel=2e-3)
    assert found.sent_bytes == copied.sent_bytes + 4 * P


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
    setting = on_processor(Setting(8, 8, cp=2, precision="float32", ring=ring), WHERE, decoder())
    block = replace(decoder().blocks[0], operations=(Operation("attention", "attention", shape=(128, 128, 8, 8, 8)),))
    found = axis_traffic(block, setting, axes_of(WHERE, setting))[0].context
    assert found == pytest.approx(seconds, rel=0.01)


def test_a_plan_asks_it() -> None:
    profile = decoder()
    ddp = estimate(profile, WHERE, Choice(Layout(dp_replicate=2), 8, 4, "float32"))
    assert ddp.time.data > 1e-9 * 4 * profile.parameters
    pipeline = estimate(profile, WHERE, Choice(Layout(pp=2), 8, 4, "float32"))
    assert pipeline.time.pipeline >= 4 * 7e-4


def test_cores_that_processes_share_are_never_idle() -> None:
    """The same figures: of a pipeline the bubble alone goes, and of copies nothing."""
    profile, shared = decoder(), replace(WHERE, device=replace(CPU, cores=0.5))
    staged, copied = (Choice(layout, 8, 2, "float32") for layout in (Layout(pp=2), Layout(dp_replicate=2)))
    alone, together = (estimate(profile, where, staged).time for where in (WHERE, shared))
    assert alone.bubble > 0 and together == replace(alone, bubble=together.bubble)
    assert together.bubble < 0.5 * alone.bubble
    assert estimate(profile, shared, copied) == estimate(profile, WHERE, copied)


def test_what_is_fixed_is_added_where_it_belongs() -> None:
    profile, choice = decoder(), Choice(Layout(dp_shard=2), 8, 2, "float32")
    plain = estimate(profile, WHERE, choice).time

    def more(**fixed: float) -> StepTime:
        where = replace(WHERE, device=replace(CPU, fixed=FixedSeconds(**fixed)))
        return estimate(profile, where, choice).time

    assert more(step=1.0).optimizer == pytest.approx(plain.optimizer + 1)
    assert more(micro_step=1.0).compute == pytest.approx(plain.compute + 2)  # two forwards
    # In each of two micro-steps a gather and a reduction of all, and another gather of the blocks.
    messages = 2 * (profile.num_repeated + 2) + profile.num_repeated
    assert more(unit_message=1.0).data == pytest.approx(plain.data + 2 * messages)
    assert more(operation=1.0).compute > plain.compute + 100
    assert more(move=1.0, hop=1.0) == plain


def test_what_a_process_takes_is_the_machines() -> None:
    profile, choice = decoder(), Choice(Layout(dp_replicate=2), 8, 2, "float32")
    known = replace(WHERE, device=replace(CPU, context_bytes=3e8))
    assert estimate(profile, known, choice).memory.framework == 3e8
    assert estimate(profile, WHERE, choice).memory.framework > 1e9


def test_an_accelerators_host_is_no_faster_than_it_was_measured() -> None:
    setting = Setting(global_batch=8, micro_batch=4)
    usual = setting.mechanisms.dispatch_seconds

    def dispatch(**given: Any) -> float:
        device = replace(CPU, **{"name": "h100", "context_bytes": None, "kernel_seconds": 3 * usual, **given})
        where = replace(WHERE, device=device)
        return on_processor(setting, where, decoder()).mechanisms.dispatch_seconds

    assert dispatch() == 3 * usual
    assert dispatch(measured=False) == dispatch(kernel_seconds=usual / 3) == usual
