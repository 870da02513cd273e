"""What tp, cp and ep send for a layer, by hand."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.model_shape import ModelShape
from allranks.planning.axis_traffic import AxisTraffic, axes_of, axis_traffic
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds, all_to_all_seconds
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.setting import Setting
from tests.planning.profiles import cluster

SHAPE = ModelShape(
    "llama", 2, 1024, 8, 4096, 8192, kv_heads=4, seq=2048, gated=True, positions="rotary", tied=False, bias=False
)
WHERE = cluster(nodes=8)


def setting(how: Mechanisms | None = None, **given: Any) -> Setting:
    return Setting(**{"global_batch": 64, "micro_batch": 1, "mechanisms": how or Mechanisms(), **given})


def traffic(shape: ModelShape = SHAPE, how: Mechanisms | None = None, **given: Any) -> AxisTraffic:
    return both(shape, how, **given)[0]


def both(shape: ModelShape, how: Mechanisms | None = None, **given: Any) -> tuple[AxisTraffic, AxisTraffic]:
    """What a block sends, and what its forward sends again where it is repeated."""
    made = setting(how, **given)
    return axis_traffic(shape.profile().blocks[1], made, axes_of(WHERE, made))


def test_one_device_sends_nothing() -> None:
    assert traffic() == AxisTraffic()


def test_tensor_parallelism_reduces_twice_in_each_direction() -> None:
    got = traffic(tp=4, micro_batch=2)
    tensor = 2.0 * 2048 * 1024 * 2
    group = axes_of(WHERE, setting(tp=4)).tensor
    # 1909.08053, section 3: two all-reduces in the forward, two in the backward.
    assert got.tensor == pytest.approx(4 * all_reduce_seconds(group, tensor))
    assert (got.tensor_bytes, got.collectives) == (8 * tensor, 2)


def test_sequence_parallelism_gathers_and_scatters_the_same_bytes() -> None:
    plain, spread = traffic(tp=4), traffic(tp=4, how=Mechanisms(sequence_parallel=True))
    group = axes_of(WHERE, setting(tp=4)).tensor
    assert spread.tensor == pytest.approx(8 * all_gather_seconds(group, 2.0 * 2048 * 1024))
    assert spread.tensor == pytest.approx(plain.tensor, rel=0.2)


def test_logits_that_are_gathered_travel_once() -> None:
    head = SHAPE.profile().blocks[2]
    logits = next(one for one in head.operations if one.kind == "matmul")
    whole = replace(head, operations=tuple(replace(o, gathered=o is logits) for o in head.operations))
    size, made = 2 * logits.output_bytes, setting(tp=4, micro_batch=2)
    before, after = (axis_traffic(block, made, axes_of(WHERE, made))[0] for block in (head, whole))
    assert after.tensor_bytes - before.tensor_bytes == size
    assert after.tensor - before.tensor == pytest.approx(all_gather_seconds(axes_of(WHERE, made).tensor, size))
    assert after.collectives - before.collectives == 1
    alone = setting(micro_batch=2)
    assert axis_traffic(whole, alone, axes_of(WHERE, alone)) == (AxisTraffic(), AxisTraffic())


def test_a_ring_hides_behind_its_attention() -> None:
    long = replace(SHAPE, seq=32768)
    assert traffic(long, cp=2).context == 0.0 < traffic(long, cp=2, ring=False).context

    def brought_by(seq: int) -> float:
        return 3 * all_gather_seconds(axes_of(WHERE, setting(cp=2)).context, 2 * 2.0 * seq * 4 * 128)

    assert traffic(long, cp=2).context_hidden == pytest.approx(brought_by(32768))
    short = traffic(replace(SHAPE, seq=256), cp=2)
    assert short.context > 0.0 and short.context + short.context_hidden == pytest.approx(brought_by(256))
    assert traffic(long, cp=2, ring=False).context_hidden == 0.0
    half = 0.5  # a rank has its own part already
    assert traffic(cp=2).context_bytes == 3 * half * (2 * 2.0 * 2048 * 4 * 128)


def test_ulysses_swaps_positions_for_heads_and_back() -> None:
    """DeepSpeed's Ulysses, 2309.14509, section 3.2: queries, keys and values before, results after; 1 / cp of each."""
    made = setting(cp=2, ring=False)
    got, group = traffic(cp=2, ring=False), axes_of(WHERE, made).context
    queries, keys = 2.0 * 1024 * SHAPE.heads * 128, 2.0 * 1024 * 4 * 128
    assert got.context_bytes == 2 * 2 * (queries + keys)
    assert got.context == pytest.approx(4 * (all_to_all_seconds(group, queries) + all_to_all_seconds(group, keys)))
    many, few = (traffic(replace(SHAPE, seq=32768), cp=cp, ring=False).context for cp in (2, 8))
    assert few < 0.8 * many  # where a ring moves all keys and values whatever cp is


def test_ulysses_repeats_key_value_heads_until_the_ranks_can_share_them() -> None:
    """As `context_ops` does: 4 heads among 8 ranks are sent twice, 6 of them four times."""
    for kv_heads, sent in ((4, 8), (6, 24), (8, 8)):
        got = traffic(replace(SHAPE, heads=24, kv_heads=kv_heads, hidden=24 * 128), cp=8, ring=False)
        assert got.context_bytes == pytest.approx(2 * 2 * 2.0 * (2048 / 8) * (24 + sent) * 128)


def test_a_ring_of_torch_sends_sums_in_float32_until_they_are_at_home() -> None:
    """Keys and values n - 1 times in each direction, the sums of their gradients n times (parallel/ring.py)."""
    how = Mechanisms(ring_sum_bytes=4.0, repeats_messages=True)
    for precision, width in (("bfloat16", 2.0), ("float32", 4.0), ("float64", 8.0)):
        part = 2 * (2048 / 4) * 4 * 128
        sent, again = both(SHAPE, how, cp=4, precision=precision)
        assert sent.context_bytes == pytest.approx(part * (2 * 3 * width + 4 * max(4.0, width)))
        assert again.context_bytes == pytest.approx(part * 3 * width)


def test_what_a_norm_has_made_travels_in_float32() -> None:
    """Gathered with 4 bytes for a product, whose result is summed in 2; both ways, and so are tokens of experts."""
    how = Mechanisms(norms_in_float32=True)
    plain, wide = traffic(tp=4), traffic(tp=4, how=how)
    assert (wide.tensor_bytes, traffic(tp=4, how=how, precision="float32").tensor_bytes) == (
        1.5 * plain.tensor_bytes,
        plain.tensor_bytes,
    )
    assert wide.tensor > 1.4 * plain.tensor
    sparse = replace(SHAPE, experts=16, top_k=4, expert_ffn=512)
    assert traffic(sparse, how, dp=16, ep=16).expert_bytes == 2 * (2048 * 4) * 1024 * (4.0 + 2.0)
    assert traffic(sparse, how, dp=16, ep=16, precision="float32").expert_bytes == 4 * (2048 * 4) * 1024 * 4.0


def test_a_repeated_forward_sends_again_what_its_backward_asks_for() -> None:
    """Of two products whose results are summed not the last one's; of a gather and a scatter there not the scatter."""
    size = 2.0 * 2048 * 1024
    assert both(SHAPE, Mechanisms(repeats_messages=True), tp=4)[1].tensor_bytes == 2 * 2 * size
    stops = Mechanisms(repeats_messages=True, recomputes_to_last_kept=True)
    assert both(SHAPE, stops, tp=4)[1].tensor_bytes == 2 * size
    cut = replace(stops, keeps_gathered_inputs=True)
    sent, again = both(SHAPE, cut, tp=4)
    assert again.tensor_bytes == 3 * size and again.tensor == pytest.approx(3 / 8 * sent.tensor)
    sparse = replace(SHAPE, experts=16, top_k=4, expert_ffn=512)
    sent, again = both(sparse, stops, dp=16, ep=16)
    assert (again.expert, again.expert_bytes) == (sent.expert / 2, sent.expert_bytes / 2) != (0.0, 0.0)
    sent, again = both(SHAPE, stops, cp=2, ring=False)
    assert (again.context, again.context_bytes) == (sent.context / 2, sent.context_bytes / 2) != (0.0, 0.0)


def test_experts_that_see_every_token_have_them_gathered() -> None:
    sparse = replace(SHAPE, experts=16, top_k=4, expert_ffn=512)
    how = Mechanisms(keeps_gathered_inputs=True)
    cut, whole = traffic(sparse, how, tp=4), traffic(sparse, replace(how, experts_see_all=True), tp=4)
    assert whole.tensor_bytes - cut.tensor_bytes == 2 * (2.0 * 2048 * 1024)
    assert whole.tensor > cut.tensor


def test_a_token_goes_to_each_of_its_experts_and_back() -> None:
    sparse = replace(SHAPE, experts=16, top_k=4, expert_ffn=512)
    got = traffic(sparse, dp=16, ep=16)
    assert got.expert_bytes == 4 * (2048 * 4) * 1024 * 2.0
    assert traffic(sparse, dp=16, ep=1).expert_bytes == 0.0


def test_a_token_may_go_to_each_node_once() -> None:
    sparse = replace(SHAPE, experts=16, top_k=4, expert_ffn=512)
    each, once = (traffic(sparse, Mechanisms(sends_once=one), dp=16, ep=16).expert for one in (False, True))
    axes = axes_of(WHERE, setting(dp=16, ep=16))
    nodes = axes.expert.size / axes.expert.near
    distinct = nodes * (1 - (1 - 1 / nodes) ** 4) / 4
    latency = 4 * axes.expert.latency_seconds
    assert once - latency == pytest.approx((each - latency) * distinct)


def test_the_mesh_puts_tp_innermost() -> None:
    axes = axes_of(WHERE, setting(tp=4, cp=2, dp=8, pp=1, shard=16, zero=3))
    assert (axes.tensor.crosses, axes.context.crosses, axes.data.crosses) == (False, False, True)
    assert (axes.tensor.size, axes.context.size, axes.data.size, axes.data.near) == (4, 2, 16, 2)


def test_groups_that_straddle_nodes_are_between_them() -> None:
    """On three nodes of eight every axis of six or three leaves a node somewhere, though rank 0's group does not."""
    three = cluster(nodes=3)
    axes = axes_of(three, setting(cp=6, dp=4, shard=24, zero=3))
    assert (axes.context.near, axes.context.link.name, axes.shard.near) == (2, "between", 8)
    axes = axes_of(three, setting(dp=24, shard=6, zero=3))
    assert (axes.shard.near, axes.shard.link.name, axes.copies.near) == (2, "between", 1)
    axes = axes_of(three, setting(tp=3, pp=2, dp=4))
    assert (axes.tensor.near, axes.data.crosses, axes.pipeline.crosses) == (1, True, True)
    alone = axes_of(three, setting(cp=6))  # no other group is there
    assert (alone.context.near, alone.context.crosses) == (6, False)


def test_an_optimizers_rows_are_shared_by_ranks_with_the_same_positions() -> None:
    """cp's are in between (parallel/optimizer_shard.py); parameters that FSDP shards are theirs, too."""
    rows = axes_of(WHERE, setting(Mechanisms(reduces_to_all=True), cp=8, dp=8, shard=8, zero=1)).shard
    assert (rows.size, rows.near, rows.crosses) == (8, 1, True)
    sharded = axes_of(WHERE, setting(cp=8, dp=8, shard=8, zero=3)).shard
    assert (sharded.size, sharded.crosses) == (8, False)


def test_the_same_experts_are_on_every_rank_of_a_sequence() -> None:
    """parallel/mesh.py: cp=2 next to each other, and of eight data-parallel ranks every fourth: {0, 1, 8, 9}."""
    how = Mechanisms(experts_apart=True)
    axes = axes_of(WHERE, setting(how, cp=2, dp=32, ep=4, shard=16, zero=3))
    assert (axes.twins.size, axes.twins.near, axes.twins.domains) == (4, 2, 2)
    assert (axes.twin_copies.size, axes.twin_copies.near) == (4, 1)
    apart = axes_of(WHERE, setting(how, cp=2, dp=32, ep=4, shard=4, zero=3))  # every rank of a copy has others
    assert (apart.twins.size, apart.twins.crosses) == (2, False)
    assert (apart.twin_copies.size, apart.twin_copies.near) == (8, 1)
