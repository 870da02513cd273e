"""What stages of a pipeline send: how often, how much, and over which link."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.model_profile import Operation
from allranks.plan import Estimate
from allranks.planning.axis_traffic import axes_of
from allranks.planning.estimate import estimate
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.pipeline_traffic import hop_seconds, message_bytes, messages_by_link, received_bytes
from allranks.planning.setting import Setting, setting_of
from tests.planning.profiles import choose, cluster, decoder

PROFILE = decoder(layers=16, hidden=1024, ffn=4096, seq=2048, vocab=256)
ACTIVATION = 2.0 * 2048 * 1024


def of(pp: int, nodes: int = 1, devices: int = 8, **changes: Any) -> Estimate:
    return estimate(PROFILE, cluster(nodes, devices), choose(64, 2, pp=pp, **changes))


def pp_rows(found: Estimate) -> dict[str, Any]:
    return {row.link: row for row in found.traffic if row.axis == "pp"}


def test_a_stage_in_the_middle_sends_on_and_back() -> None:
    rows = pp_rows(of(8))
    assert list(rows) == ["inside"]
    assert rows["inside"].count == 2 * 32
    assert rows["inside"].sent_bytes == 2 * 32 * 2 * ACTIVATION


def test_of_two_stages_each_sends_one_way() -> None:
    row = pp_rows(of(2, dp_replicate=4))["inside"]
    assert (row.count, row.sent_bytes) == (8, 8 * 2 * ACTIVATION)


def test_each_link_has_its_own_row() -> None:
    """Two nodes of four: the hop in the middle leaves the node, both ways; all others stay inside."""
    rows = pp_rows(of(8, nodes=2, devices=4))
    assert (rows["inside"].count, rows["between"].count) == (2 * 32, 32)
    assert rows["between"].sent_bytes == 32 * 2 * ACTIVATION
    far_apart = pp_rows(of(2, nodes=2, devices=4, dp_replicate=4))
    assert list(far_apart) == ["between"]


def test_stages_that_straddle_nodes_send_over_both_links() -> None:
    """Four stages of six ranks on three nodes: rank 0 sends to 6 beside it and rank 2 to 8 on the next node."""
    rows = pp_rows(of(4, nodes=3, dp_replicate=6))
    assert (rows["inside"].count, rows["between"].count) == (6, 2 * 6)
    setting = Setting(64, 1, dp=6, pp=2)
    assert messages_by_link(setting, 8) == (1, 1)
    there = cluster(nodes=3)
    crossing, inside = (hop_seconds(PROFILE, one, axes_of(there, one)) for one in (setting, Setting(64, 1, dp=4, pp=2)))
    assert crossing > 5 * inside


def test_what_is_waited_for_is_the_steps_time() -> None:
    found = of(4, nodes=4, devices=1)
    (row,) = pp_rows(found).values()
    assert row.hidden_seconds == pytest.approx(0.0)
    assert row.seconds == pytest.approx(found.time.pipeline)


@pytest.mark.parametrize(
    ("schedule", "pp", "messages"),
    [("1f1b", 4, 2), ("1f1b", 2, 1), ("interleaved", 4, 4), ("interleaved", 2, 3), ("zbv", 4, 4), ("zbv", 2, 2)],
)
def test_messages_of_a_micro_step(schedule: str, pp: int, messages: int) -> None:
    """zbv turns around on the last rank, which sends itself nothing."""
    layout = choose(64, 1, pp=pp, schedule=schedule).layout
    setting = Setting(64, 1, pp=pp, chunks=layout.num_stages // pp, schedule=schedule)
    assert messages_by_link(setting, 8) == (messages, 0)


def test_a_shapes_stream_is_float32_where_no_weight_is_gathered_in_16_bits() -> None:
    """As traced ones have it already; and experts give back what a norm has made, whoever gathers."""
    of_shape = replace(PROFILE, blocks=tuple(replace(block, low_stream=True) for block in PROFILE.blocks))
    copies, shards = (setting_of(choose(64, 2, pp=2, **data)) for data in ({"dp_replicate": 4}, {"dp_shard": 4}))
    assert message_bytes(PROFILE, copies) == message_bytes(of_shape, shards) == 2 * ACTIVATION
    assert message_bytes(of_shape, copies) == 4 * ACTIVATION
    expert = Operation("up", "matmul", cut="expert", shape=(4, 4, 4))
    experts = replace(of_shape, blocks=tuple(replace(b, operations=(expert,)) for b in of_shape.blocks))
    assert message_bytes(experts, shards) == 4 * ACTIVATION


def test_a_traced_stream_is_as_wide_as_its_trace_with_gathered_weights() -> None:
    traced = replace(PROFILE, blocks=tuple(replace(block, low_share=0.5) for block in PROFILE.blocks))
    copies, shards = (setting_of(choose(64, 2, pp=2, **data)) for data in ({"dp_replicate": 4}, {"dp_shard": 4}))
    assert message_bytes(traced, copies) == 2 * ACTIVATION
    assert message_bytes(traced, shards) == ACTIVATION


@pytest.mark.parametrize(
    ("schedule", "rank", "messages"),
    [("1f1b", 0, 1), ("1f1b", 1, 2), ("1f1b", 3, 1), ("interleaved", 0, 3), ("interleaved", 1, 4), ("zbv", 0, 2)],
)
def test_stages_keep_memory_for_every_micro_step_that_they_receive(schedule: str, rank: int, messages: int) -> None:
    """torch's PipelineStage; of four ranks, an activation for each stage but the first, a gradient but for the last."""
    setting = setting_of(replace(choose(64, 2, pp=4, schedule=schedule), chunks=1 if schedule == "1f1b" else 2))
    assert received_bytes(PROFILE, setting, rank) == 32 * messages * message_bytes(PROFILE, setting)
    assert received_bytes(PROFILE, replace(setting, pp=1), rank) == 0.0
    assert received_bytes(PROFILE, replace(setting, mechanisms=Mechanisms()), rank) == 0.0


def test_what_is_cut_is_sent_in_parts() -> None:
    whole = message_bytes(PROFILE, Setting(64, 2, pp=2))
    assert whole == 2 * ACTIVATION
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, cp=2)) == whole / 2
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, tp=4)) == whole
    scattered = Mechanisms(scattered_sends=True)
    assert message_bytes(PROFILE, Setting(64, 2, pp=2, tp=4, mechanisms=scattered)) == whole / 4


def test_what_runs_behind_computation_is_hidden() -> None:
    there, half = cluster(4, 1), Mechanisms(overlap_pipeline=0.5)
    plain, overlapped = Setting(64, 1, pp=4), Setting(64, 1, pp=4, mechanisms=half)
    waits = [hop_seconds(PROFILE, setting, axes_of(there, setting)) for setting in (plain, overlapped)]
    assert waits[1] == pytest.approx(waits[0] / 2)
    assert hop_seconds(PROFILE, Setting(64, 1), axes_of(there, Setting(64, 1))) == 0.0
