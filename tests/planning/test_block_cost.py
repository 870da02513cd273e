"""A block's cost: sums over its operations, and what recompute changes."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.model_profile import Block
from allranks.model_shape import ModelShape
from allranks.planning.axis_traffic import axes_of
from allranks.planning.block_cost import BlockCost
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.operation_times import UNFUSED_KERNELS, operation_times
from allranks.planning.setting import Setting
from tests.planning.profiles import cluster, cost_of

SHAPE = ModelShape(
    "llama", 2, 1024, 8, 4096, 8192, kv_heads=4, seq=2048, gated=True, positions="rotary", tied=False, bias=False
)


def cost(number: int = 1, how: Mechanisms | None = None, **given: Any) -> BlockCost:
    setting = Setting(**{"global_batch": 8, "micro_batch": 1, "mechanisms": how or Mechanisms(), **given})
    return cost_of(SHAPE.profile().blocks[number], setting, axes_of(cluster(), setting))


def test_it_is_the_sum_of_its_operations() -> None:
    setting = Setting(global_batch=8, micro_batch=1)
    axes = axes_of(cluster(), setting)
    layer = SHAPE.profile().blocks[1]
    each = [operation_times(operation, setting, axes.machine, 0) for operation in layer.operations]
    got = cost()
    assert got.forward == pytest.approx(sum(one.forward for one in each))
    assert got.backward == pytest.approx(sum(one.backward for one in each))
    assert got.weight == pytest.approx(sum(one.weight for one in each))
    assert (got.parameters, got.expert_parameters) == (layer.parameters, 0)
    assert got.kept_bytes == layer.saved_bytes
    assert got.entry_bytes == 2.0 * 2048 * 1024


def test_tensor_parallelism_divides_the_matrices() -> None:
    matrices = SHAPE.profile().blocks[1].parameters - 2 * 1024
    assert cost(tp=4).parameters == matrices / 4 + 2 * 1024


def test_full_recompute_repeats_the_forward_and_keeps_the_input() -> None:
    how = Mechanisms(repeats_messages=True)
    plain, full = cost(tp=2, how=how), cost(tp=2, recompute="full", how=how)
    assert full.again == plain.forward
    assert (full.tensor, full.tensor_bytes) == (1.5 * plain.tensor, 1.5 * plain.tensor_bytes) != (0.0, 0.0)
    assert full.kept_bytes == plain.entry_bytes
    assert full.working_bytes == plain.kept_bytes + plain.working_bytes


def test_full_recompute_ends_with_what_the_backward_asks_for() -> None:
    """Neither the block's last product nor what adds it to the stream is run again."""
    setting = Setting(global_batch=8, micro_batch=1)
    axes = axes_of(cluster(), setting)
    last = {o.name: o for o in SHAPE.profile().blocks[1].operations}
    spared = sum(operation_times(last[name], setting, axes.machine, 0).forward for name in ("mlp.down", "residual2"))
    full = cost(recompute="full", how=Mechanisms(recomputes_to_last_kept=True))
    assert full.again == pytest.approx(full.forward - spared)


def test_selective_recompute_keeps_every_second_product_and_attention() -> None:
    """Query, value, gate and down, and attention's result."""
    got = cost(recompute="selective")
    row = 2.0 * 2048
    assert got.kept_bytes - got.entry_bytes == pytest.approx(row * ((1024 + 512 + 4096 + 1024) + 1024))
    assert 0.2 * got.forward < got.again < 0.6 * got.forward


def test_selective_recompute_keeps_no_product_of_experts() -> None:
    """Their grouped products are none of `MATRIX_PRODUCTS` (parallel/recompute.py); a router's is."""
    sparse = replace(SHAPE, experts=8, top_k=2, expert_ffn=2048)
    setting = Setting(global_batch=8, micro_batch=1, recompute="selective")
    got = cost_of(sparse.profile().blocks[1], setting, axes_of(cluster(), setting))
    kept = 2.0 * 2048 * ((1024 + 512) + 1024) + 4.0 * 2048 * 8
    assert got.kept_bytes - got.entry_bytes == pytest.approx(kept)


def test_megatrons_selective_recompute_repeats_unfused_attention_alone() -> None:
    how = Mechanisms(selective="attention", fused_attention=False)
    plain, selective = cost(how=how), cost(how=how, recompute="selective")
    assert plain.kept_bytes - selective.kept_bytes == 2 * 8 * 2048**2
    assert cost(how=Mechanisms(selective="attention"), recompute="selective").again == 0.0


def test_as_many_kernels_are_started_again_as_are_repeated() -> None:
    """Whatever share of the forward's seconds they take."""
    none, some, full = (cost(recompute=mode) for mode in ("none", "selective", "full"))
    # Selective: both norms, three that move bytes, out, a quarter of query, key and value, half of gate and up.
    repeated = 2 * 1 + 3 * 2 + 2 + 2 / 4 + 2 / 2
    assert (none.kernels_again, some.kernels_again, full.kernels_again) == (0, repeated, full.kernels)
    early = cost(recompute="full", how=Mechanisms(recomputes_to_last_kept=True))
    assert early.kernels_again == full.kernels - 4
    for fused in (True, False):
        how = Mechanisms(selective="attention", fused_attention=fused)
        assert cost(how=how, recompute="selective").kernels_again == (0 if fused else UNFUSED_KERNELS)


def test_the_ends_are_never_recomputed() -> None:
    assert cost(2, recompute="full").again == 0.0


def test_the_loss_holds_copies_of_the_logits() -> None:
    logits = 2048 * 8192
    assert cost(2).logits_bytes == 12 * logits  # log-softmax, its gradient, and the gradient of what it picks
    assert cost(2, how=Mechanisms(logits_copies=1.0)).logits_bytes == 4 * logits
    assert cost(2, tp=2).logits_bytes == 6 * logits
    assert cost(2, tp=2, how=Mechanisms(cut_logits_copies=5.0)).logits_bytes == 10 * logits
    assert cost(2, how=Mechanisms(cut_logits_copies=5.0)).logits_bytes == 12 * logits


def test_a_traced_loss_holds_what_it_was_seen_to_hold() -> None:
    loss = replace(SHAPE.profile().blocks[2].operations[-1], cut="", peak_bytes=1000.0)
    setting = Setting(global_batch=8, micro_batch=4)
    assert cost_of(Block("head", (loss,)), setting, axes_of(cluster(), setting)).logits_bytes == 4 * 1000.0
    untraced = cost_of(Block("head", (replace(loss, peak_bytes=0.0),)), setting, axes_of(cluster(), setting))
    assert untraced.logits_bytes == 4 * 3.0 * loss.saved_bytes
    apart = Setting(global_batch=8, micro_batch=1, tp=4, mechanisms=Mechanisms(cut_logits_copies=5.0))
    cut = replace(loss, cut="vocab")
    assert cost_of(Block("head", (cut,)), apart, axes_of(cluster(), apart)).logits_bytes == 5.0 * loss.saved_bytes / 4


def test_logits_that_tp_gathers_are_whole_in_the_loss() -> None:
    loss = replace(SHAPE.profile().blocks[2].operations[-1], cut="")
    setting = Setting(8, 1, tp=2, mechanisms=Mechanisms(cut_logits_copies=5.0))
    found = cost_of(Block("head", (loss,)), setting, axes_of(cluster(), setting))
    assert found.logits_bytes == 12 * 2048 * 8192


def test_a_backward_holds_a_products_gradients() -> None:
    got = cost(how=Mechanisms(temporary_gradient_bytes=6))
    # The largest: up, with 2 * 4096 results and 1024 inputs a position, and its weights' gradient in 16 and 32 bits.
    assert got.working_bytes == 2.0 * 2048 * (2 * 4096 + 1024) + 6 * (2 * 4096 * 1024)


def test_operands_in_eight_bits_are_kept_in_eight() -> None:
    inputs = 2 * (2.0 * 2048 * 1024)  # of the query and of the feed-forward; the others' are counted where they arise
    assert cost().kept_bytes - cost(precision="float8").kept_bytes == inputs / 2


def test_a_head_that_is_the_embedding_is_copied() -> None:
    """In autocast's type for the product; and whole on a pipeline's last stage, which cannot reach the first one's."""
    head = replace(SHAPE, tied=True).profile().blocks[2]
    matrix, norm = SHAPE.hidden * SHAPE.vocab, SHAPE.hidden

    def found(**given: Any) -> BlockCost:
        setting = Setting(**{"global_batch": 8, "micro_batch": 1, "mechanisms": Mechanisms(copies_tied=True), **given})
        return cost_of(head, setting, axes_of(cluster(), setting))

    assert (found().parameters, found().cast_parameters) == (norm, matrix)
    assert (found(pp=2).parameters, found(pp=2, tp=2).parameters) == (norm + matrix, norm + matrix / 2)
    assert found(pp=2).trained == norm + matrix
    others = found(pp=2, mechanisms=Mechanisms())
    assert (others.parameters, others.cast_parameters) == (norm, 0)


def test_experts_that_ep_cuts_keep_what_a_forward_has_cast() -> None:
    sparse = replace(SHAPE, experts=8, top_k=2, expert_ffn=2048).profile().blocks[1]
    how = Mechanisms(experts_stay=True)
    cut = Setting(8, 1, dp=4, ep=4, mechanisms=how)
    kept, without = (cost_of(sparse, one, axes_of(cluster(), one)) for one in (cut, replace(cut, precision="float32")))
    assert kept.kept_bytes - without.kept_bytes == 2 * kept.expert_parameters > 0


def test_a_ring_has_work_of_its_own_which_both_kinds_of_recompute_repeat() -> None:
    ours, other = Mechanisms(ring_sum_bytes=4.0, recomputes_to_last_kept=True), Mechanisms(recomputes_to_last_kept=True)
    for recompute, repeated in (("none", 0), ("selective", 1), ("full", 1)):
        got, plain = (cost(how=how, cp=4, recompute=recompute) for how in (ours, other))
        more = got.forward - plain.forward
        assert more > 0.0 and got.backward > plain.backward
        assert got.again - plain.again == pytest.approx(repeated * more)
        assert got.kernels - plain.kernels == 3 * 10
        assert got.kernels_again - plain.kernels_again == repeated * 3 * 10
