"""The whole estimate: what a configuration costs, and what changes when one thing changes."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.named_models import find_model
from allranks.plan import Estimate
from allranks.planning.block_parts import parts_of
from allranks.planning.collectives import all_reduce_seconds, group_of
from allranks.planning.constants import constants_of
from allranks.planning.estimate import SOCKET, estimate, estimate_setting
from allranks.planning.hardware import find_cluster
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.room import MEMORY_HIGH, MEMORY_LOW, PEAK_HIGH, USABLE
from allranks.planning.setting import Setting
from allranks.rehearsed_messages import COPIES_OF_EXPERTS
from tests.planning.profiles import choose, cluster, decoder

LLAMA = find_model("llama3-8b").profile(4096)
NODE = find_cluster("8:h100")
NODES = find_cluster("4x8:h100")


def of(global_batch: int = 64, micro_batch: int = 1, nodes: Any = NODES, **layout: Any) -> Estimate:
    return estimate(LLAMA, nodes, choose(global_batch, micro_batch, **layout))


def test_the_same_arguments_give_the_same_estimate() -> None:
    assert of(dp_shard=32) == of(dp_shard=32)


def test_samples_tokens_and_mfu_follow_from_the_seconds() -> None:
    got = of(dp_shard=32)
    seconds = got.step_seconds.expected
    assert got.time.total == seconds
    assert got.samples_per_second == pytest.approx(64 / seconds)
    assert got.tokens_per_second == pytest.approx(64 * 4096 / seconds)
    peak = 32 * NODES.device.peak_flops["bfloat16"]
    assert got.mfu == pytest.approx(3 * LLAMA.flops * 64 / (seconds * peak))
    assert 0.2 < got.mfu < 0.7


def test_intervals_hold_what_is_expected() -> None:
    got = of(dp_shard=32)
    assert got.step_seconds.low < got.step_seconds.expected < got.step_seconds.high
    assert got.peak_bytes.low < got.peak_bytes.expected <= got.peak_bytes.high
    assert got.capacity_bytes == USABLE * NODES.device.memory_bytes
    used = got.memory.total
    assert got.peak_bytes.low == MEMORY_LOW * used
    assert got.peak_bytes.high == min(PEAK_HIGH * got.peak_bytes.expected, got.capacity_bytes)
    full = of(nodes=NODE, dp_replicate=8)
    assert full.peak_bytes.high == MEMORY_HIGH * full.memory.total > full.capacity_bytes


def test_an_eight_billion_model_does_not_fit_whole_and_fits_in_shards() -> None:
    # 16 bytes for each of 8.03 billion parameters alone are 128 GB.
    assert not of(nodes=NODE, dp_replicate=8).fits
    assert of(nodes=NODE, dp_shard=8, recompute="full").fits


def test_float32_states_take_their_bytes() -> None:
    use = of(nodes=NODE, dp_shard=8).memory
    assert use.weights + use.gradients + use.optimizer == pytest.approx(16 * LLAMA.parameters / 8)


def test_recompute_trades_time_for_memory() -> None:
    none, some, full = (of(dp_shard=32, recompute=mode) for mode in ("none", "selective", "full"))
    assert none.memory.activations > some.memory.activations > full.memory.activations
    assert none.step_seconds.expected < some.step_seconds.expected < full.step_seconds.expected
    assert full.time.recompute > 0.2 * full.time.compute / 3


def test_a_longer_sequence_takes_no_less_where_the_host_is_slower() -> None:
    """Attention, which recompute=selective keeps, takes ever more of the forward; as many kernels are started again."""
    seconds = []
    for seq in range(256, 704, 64):
        profile, choice = find_model("llama3-8b").profile(seq), choose(64, tp=8, recompute="selective")
        seconds.append(estimate(profile, NODE, choice).step_seconds.expected)
    assert seconds == sorted(seconds)


def test_more_tensor_parallelism_takes_less_memory_and_more_communication() -> None:
    one, two, four = (of(dp_shard=32 // tp, tp=tp) for tp in (1, 2, 4))
    assert one.time.tensor == 0.0 < two.time.tensor < four.time.tensor
    assert one.memory.activations > two.memory.activations > four.memory.activations


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside, across = of(tp=8, dp_shard=4), of(tp=16, dp_shard=2)
    assert across.time.tensor > 2 * inside.time.tensor


def test_a_pipeline_has_a_bubble_that_more_micro_steps_make_smaller() -> None:
    few, many = of(global_batch=32, pp=4, dp_shard=8), of(global_batch=512, pp=4, dp_shard=8)
    assert few.time.bubble / few.time.total > 2 * many.time.bubble / many.time.total
    assert {0, 3} <= set(few.stages)
    assert few.stages[0].activations > few.stages[3].activations


def test_data_parallel_seconds_are_those_of_its_collective() -> None:
    toy = cluster(nodes=2)
    profile = decoder(hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=32768, seq=128)
    got = estimate(profile, toy, choose(16, 1, dp_replicate=16))
    (row,) = got.traffic
    group = group_of(toy, constants_of(toy.device), 16, ((16, 1),))
    assert row.seconds == pytest.approx(all_reduce_seconds(group, 4.0 * profile.parameters))
    assert (row.axis, row.link) == ("dp", "between")
    assert got.time.data == pytest.approx(row.seconds - row.hidden_seconds)


def test_a_ring_that_nobody_waits_for_takes_its_time_all_the_same() -> None:
    got = of(dp_shard=16, cp=2)
    (row,) = [row for row in got.traffic if row.axis == "cp"]
    assert row.seconds > 0 and got.time.context == pytest.approx(row.seconds - row.hidden_seconds)


def test_under_hsdp_each_link_has_its_own_traffic() -> None:
    """Who shares parameters stays inside a node, and the copies meet across them."""
    got = of(dp_replicate=4, dp_shard=8)
    shared, copies = got.traffic
    assert [(row.axis, row.link) for row in got.traffic] == [
        ("dp_shard", NODES.inside.name),
        ("dp_replicate", NODES.between.name),
    ]
    assert copies.sent_bytes == pytest.approx(2 * 4 * LLAMA.parameters / 8), "once a step of two micro-steps"
    assert shared.sent_bytes > 4 * copies.sent_bytes > 0
    assert got.time.data == pytest.approx(sum(row.seconds - row.hidden_seconds for row in got.traffic))


def test_a_ring_that_straddles_nodes_takes_the_network() -> None:
    """cp=6 on nodes of eight: {6-11} has two ranks in the first node; it was planned as if all were in one."""
    (row,) = [
        row for row in estimate(LLAMA, cluster(nodes=3), choose(24, 1, dp_shard=4, cp=6)).traffic if row.axis == "cp"
    ]
    (aligned,) = [
        row for row in estimate(LLAMA, cluster(nodes=3), choose(24, 1, dp_shard=3, cp=8)).traffic if row.axis == "cp"
    ]
    assert (row.link, aligned.link) == ("between", "inside") and row.seconds > 3 * aligned.seconds


def test_what_experts_copies_move_has_a_row_of_its_own() -> None:
    """Sharded ones are gathered and reduced, of which backwards hide some; whole ones are summed at the end."""
    profile = find_model("mixtral-8x7b").profile(4096)
    shared = estimate(profile, NODES, choose(64, 1, dp_shard=32, ep=8))
    (row,) = [row for row in shared.traffic if row.axis == COPIES_OF_EXPERTS]
    assert 0 < row.hidden_seconds < row.seconds and row.link == NODES.between.name
    exposed = sum(row.seconds - row.hidden_seconds for row in shared.traffic if row.axis != "ep")
    assert shared.time.data == pytest.approx(exposed)
    got = estimate(profile, NODES, choose(64, 1, dp_replicate=32, ep=8))
    rows = {row.axis: row for row in got.traffic}
    assert set(rows) == {"ep", "dp", COPIES_OF_EXPERTS}
    twins = rows[COPIES_OF_EXPERTS]
    assert twins.link == NODES.between.name and twins.hidden_seconds == 0.0 and twins.seconds > 0
    exposed = sum(row.seconds - row.hidden_seconds for row in got.traffic if row.axis != "ep")
    assert got.time.data == pytest.approx(exposed)


def test_frozen_blocks_take_their_weights_alone() -> None:
    """As a head on a frozen model does: no gradient, no moment of Adam's, and no update of theirs."""
    frozen = tuple(
        replace(block, operations=tuple(replace(one, trained=not block.repeated) for one in block.operations))
        for block in LLAMA.blocks
    )
    some, one = replace(LLAMA, blocks=frozen, digest="frozen"), choose(8, 1)
    got, whole = estimate(some, NODES, one), estimate(LLAMA, NODES, one)
    assert got.memory.weights == whole.memory.weights == pytest.approx(4 * LLAMA.parameters)
    assert got.memory.optimizer == pytest.approx(8 * some.trained_parameters)
    assert got.memory.optimizer < 0.2 * whole.memory.optimizer
    assert got.memory.gradients < 0.2 * whole.memory.gradients
    assert got.time.optimizer < 0.2 * whole.time.optimizer


def test_faster_links_and_faster_devices_make_shorter_steps() -> None:
    slow = replace(NODES, between=replace(NODES.between, bandwidth=NODES.between.bandwidth / 50))
    assert of(dp_shard=32).time.data < of(nodes=slow, dp_shard=32).time.data
    older = find_cluster("4x8:a100-80g")
    assert of(nodes=older, dp_shard=32).time.compute > 1.5 * of(dp_shard=32).time.compute


def test_hosts_of_two_sockets_wait_for_each_other_at_every_collective() -> None:
    profile = decoder()

    def host_bound(tp: int, wait: float) -> tuple[float, float]:
        how = Mechanisms(dispatch_seconds=1e-2, wait_seconds=wait)
        setting = Setting(global_batch=1, micro_batch=1, tp=tp, mechanisms=how)
        costs = parts_of(profile, NODE, setting).costs
        pairs = zip(profile.blocks, costs, strict=True)
        return estimate_setting(profile, NODE, setting).time.compute, sum(b.count * c.collectives for b, c in pairs)

    assert host_bound(SOCKET, 1e-2) == host_bound(SOCKET, 0.0)
    (waiting, collectives), (alone, _) = host_bound(8, 1e-2), host_bound(8, 0.0)
    assert waiting - alone == pytest.approx(3 * collectives * (8 - SOCKET) * 1e-2, rel=1e-3)  # forward and backward


def test_offloaded_activations_leave_the_device() -> None:
    here, there = of(dp_shard=32), of(dp_shard=32, offload="activations")
    assert there.memory.activations < here.memory.activations / 2


def test_a_step_of_more_samples_takes_longer() -> None:
    assert of(128, dp_shard=32).step_seconds.expected > 1.5 * of(64, dp_shard=32).step_seconds.expected


def test_the_second_stage_may_be_the_fullest() -> None:
    # 14 layers on 8 stages are 1, 2, 2, 2, 2, 2, 2, 1: the second has 7 micro-steps of two layers, the first 8 of one.
    profile = decoder(layers=14, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=256, seq=1024)
    got = estimate(profile, cluster(), choose(64, 1, pp=8))
    assert got.stages[1].activations > 1.5 * got.stages[0].activations
    assert got.memory == got.stages[1]
