"""What the axes leave of an operation, and the seconds of its three passes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from allranks.model_profile import Operation
from allranks.model_shape import ModelShape
from allranks.parallel.ring import _merge
from allranks.planning.compute import GROUPED, KERNEL_SECONDS, Machine, matmul_seconds, moving_seconds
from allranks.planning.constants import constants_of
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.operation_times import (
    RING_KERNELS,
    attention_times,
    in_low_precision,
    is_product,
    kept_score_bytes,
    merging_seconds,
    num_scores,
    operation_times,
    share_of,
)
from allranks.planning.setting import Setting
from tests.planning.profiles import cluster

MACHINE = Machine(cluster().device, constants_of(cluster().device))
SHAPE = ModelShape("gpt", 2, 1024, 8, 4096, 8192, seq=2048)
PLAIN = Mechanisms(accumulate_bytes=0)


def operation(name: str, shape: ModelShape = SHAPE) -> Operation:
    blocks = shape.profile().blocks
    return next(o for block in blocks for o in block.operations if o.name == name)


def setting(how: Mechanisms = PLAIN, **given: Any) -> Setting:
    return Setting(**{"global_batch": 8, "micro_batch": 1, "mechanisms": how, **given})


@pytest.mark.parametrize(
    ("name", "work", "weights", "kept"),
    [
        ("mlp.up", 8, 4, 2),  # column: its input is whole on each of tp's ranks
        ("mlp.down", 8, 4, 8),
        ("attention.scores", 8, 4, 8),
        ("norm1", 2, 1, 2),
        ("head", 8, 4, 2),
    ],
)
def test_tp_4_and_cp_2_divide(name: str, work: float, weights: float, kept: float) -> None:
    share = share_of(operation(name), setting(tp=4, cp=2))
    assert (share.work, share.weights, share.kept) == (work, weights, kept)


def test_sequence_parallelism_divides_norms_too() -> None:
    share = share_of(operation("norm1"), setting(replace(PLAIN, sequence_parallel=True), tp=4, cp=2))
    assert (share.work, share.weights, share.kept) == (8, 1, 8)


def test_a_product_takes_three_products() -> None:
    up = operation("mlp.up")
    times = operation_times(up, setting(micro_batch=2, tp=2), MACHINE, 0)
    rows, out, into = 2 * 2048, 4096 / 2, 1024
    assert times.forward == matmul_seconds(MACHINE, rows, out, into, "bfloat16")
    assert times.backward == matmul_seconds(MACHINE, rows, into, out, "bfloat16")
    assert times.weight == matmul_seconds(MACHINE, out, into, rows, "bfloat16")


def test_adding_up_gradients_moves_bytes() -> None:
    up = operation("mlp.up")
    with_sum = operation_times(up, setting(Mechanisms(accumulate_bytes=12)), MACHINE, 0).weight
    without = operation_times(up, setting(), MACHINE, 0).weight
    assert with_sum - without == pytest.approx(12 * 4096 * 1024 / MACHINE.bandwidth)


def test_frozen_weights_take_no_gradient() -> None:
    assert operation_times(operation("mlp.up"), setting(frozen=True), MACHINE, 0).weight == 0.0


def test_eight_bits_are_for_the_blocks_linear_layers() -> None:
    low = setting(precision="float8")
    assert in_low_precision(operation("mlp.up"), low)
    assert not in_low_precision(operation("head"), low)
    assert not in_low_precision(operation("mlp.up"), setting())


def test_elementwise_operations_are_bound_by_what_they_move() -> None:
    norm = operation("norm1")
    times = operation_times(norm, setting(tp=2), MACHINE, 0)
    assert times.forward == pytest.approx(moving_seconds(MACHINE, norm.moved_bytes, 1))
    assert times.backward == 2 * times.forward
    fused = operation_times(norm, setting(replace(PLAIN, fusion=0.5)), MACHINE, 0)
    assert times.forward - fused.forward == pytest.approx(norm.moved_bytes / 2 / MACHINE.bandwidth)


def test_a_norm_of_many_kernels_moves_as_often() -> None:
    """It is the norm alone, and what others fuse does not make it one kernel."""
    by_hand = setting(replace(PLAIN, fusion=0.5, norm_passes=9.0))
    norm, residual = operation("norm1"), operation("residual1")
    plain, made = (operation_times(norm, one, MACHINE, 0).forward for one in (setting(), by_hand))
    assert made - plain == pytest.approx(8 * norm.moved_bytes / MACHINE.bandwidth)
    fused = operation_times(residual, setting(replace(PLAIN, fusion=0.5)), MACHINE, 0)
    assert operation_times(residual, by_hand, MACHINE, 0) == fused


def test_a_fused_loss_moves_less() -> None:
    loss = operation("loss")
    both = [setting(replace(PLAIN, logits_copies=copies)) for copies in (3.0, 1.0)]
    plain, fused = (operation_times(loss, one, MACHINE, 0).forward for one in both)
    assert plain - fused == pytest.approx(loss.moved_bytes * 2 / 3 / MACHINE.bandwidth)


def test_fused_attention_does_five_products_in_its_backward() -> None:
    times = attention_times(operation("attention.scores"), setting(), MACHINE)
    assert times.backward / times.forward == pytest.approx(2.5 / 0.8)


def test_a_window_spares_fused_attention_alone_what_lies_outside() -> None:
    """1024 of 16384 positions: a sixteenth of the keys, of which causal attention masks a thirty-second, not half."""
    long = replace(SHAPE, seq=16384)
    full, some = (operation("attention.scores", shape) for shape in (long, replace(long, windows=(1024,))))
    fused = [attention_times(one, setting(), MACHINE).forward - KERNEL_SECONDS for one in (full, some)]
    assert fused[1] / fused[0] == pytest.approx((1 - 1 / 32) / 16 / 0.5)
    by_hand = setting(replace(PLAIN, fused_attention=False))
    assert attention_times(full, by_hand, MACHINE) == attention_times(some, by_hand, MACHINE)


def test_under_cp_a_window_is_a_mask_behind_which_all_is_computed() -> None:
    """Of every second layer; the others are causal, and spare half."""
    full, some = (operation("attention.scores", replace(SHAPE, windows=one)) for one in ((), (1024, 0)))
    seconds = [attention_times(one, setting(cp=2), MACHINE).forward - KERNEL_SECONDS for one in (full, some)]
    assert seconds[1] / seconds[0] == pytest.approx((1.0 + 0.5) / 2 / 0.5)


def test_unfused_attention_moves_its_scores() -> None:
    scores = operation("attention.scores")
    how = replace(PLAIN, fused_attention=False, attention_dropout=True)
    assert num_scores(scores, setting(tp=2)) == 8 / 2 * 2048 * 2048
    assert kept_score_bytes(scores, setting(how)) == 5 * 8 * 2048**2  # 2205.05198, equation 1: 5 a s^2
    assert kept_score_bytes(scores, setting(replace(how, attention_dropout=False))) == 2 * 8 * 2048**2
    slow = attention_times(scores, setting(how), MACHINE)
    assert slow.forward > attention_times(scores, setting(), MACHINE).forward


def test_experts_share_their_rows_among_groups() -> None:
    shape = replace(SHAPE, experts=8, top_k=2, expert_ffn=2048, gated=True)
    up = operation("experts.up", shape)
    times = operation_times(up, setting(ep=4), MACHINE, 8)
    # 4096 routed positions over the two experts of each rank of ep; its rows come from four ranks.
    one = matmul_seconds(MACHINE, 2048 * 2 / 2, 4096, 1024, "bfloat16", 2)
    assert times.forward == pytest.approx(one / GROUPED)
    assert is_product(up)
    assert not is_product(operation("norm1"))


def test_an_expert_may_have_any_number_of_positions() -> None:
    """deepseek-v2's 1228.8 a rank: the weights' gradient has them inside, where no row of memory lies along them."""
    shape = replace(SHAPE, experts=8, top_k=3, expert_ffn=2048, gated=True, seq=820)
    times = operation_times(operation("experts.up", shape), setting(), MACHINE, 8)
    assert (820 * 3 / 8) % 8  # 307.5 for each
    assert times.weight == pytest.approx(times.forward, rel=0.5)


def test_an_operation_without_figures_takes_no_time() -> None:
    times = operation_times(Operation("nothing", "elementwise"), setting(), MACHINE, 0)
    assert (times.forward, times.backward, times.weight) == (0.0, 0.0, 0.0)
    assert KERNEL_SECONDS > 0


class Moved(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    num_bytes = kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            touched = [one for one in tree_leaves((args, kwargs, found)) if isinstance(one, torch.Tensor)]
            self.num_bytes += sum(one.nbytes for one in touched)
            self.kernels += 1
        return found


@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
def test_a_ring_merges_what_each_further_pass_has_found(precision: str) -> None:
    """As many bytes as parallel/ring.py moves, and as many kernels besides attention's own."""
    low: torch.dtype = getattr(torch, precision)
    wide = torch.promote_types(low, torch.float32)
    merged, log_sum = torch.zeros(1, 8, 16, 512, dtype=wide), torch.zeros(1, 8, 16, dtype=wide)
    block, block_sum = merged.to(low), log_sum.clone()
    with Moved() as moved:  # type: ignore[no-untyped-call]
        _merge(merged, log_sum, block, block_sum)
    assert moved.kernels == RING_KERNELS - 1
    each = moved.num_bytes / merged.numel()
    scores = operation("attention.scores")
    for cp in (2, 4):
        there = setting(Mechanisms(ring_sum_bytes=4.0), cp=cp, tp=2, precision=precision)
        forward, _ = merging_seconds(scores, there, MACHINE)
        one = forward / (cp - 1) - RING_KERNELS * MACHINE.floor
        assert one * MACHINE.bandwidth == pytest.approx(each * 2048 * 1024 / (cp * 2), rel=0.01)


def test_a_rings_backward_adds_gradients_of_queries_keys_and_values() -> None:
    """To sums in float32: of queries all, of keys and values under a causal mask half."""
    there = setting(Mechanisms(ring_sum_bytes=4.0), cp=4)
    scores = replace(operation("attention.scores"), causal=True)
    seconds = [merging_seconds(replace(scores, causal=causal), there, MACHINE)[1] for causal in (True, False)]
    part = 2048 * 1024 / 4 * (4.0 + 4.0 + 2.0)
    assert seconds[1] - seconds[0] == pytest.approx(3 * part / MACHINE.bandwidth)


def test_only_the_engines_ring_merges() -> None:
    scores, how = operation("attention.scores"), Mechanisms(ring_sum_bytes=4.0)
    for there in (setting(how), setting(how, cp=2, ring=False), setting(cp=2)):
        assert merging_seconds(scores, there, MACHINE) == (0.0, 0.0)
