"""Bytes by category, against what ZeRO's and Korthikanti's papers count."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.model_shape import ModelShape
from allranks.plan import MemoryUse
from allranks.planning.axis_traffic import axes_of
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.memory import memory_use, slack_bytes
from allranks.planning.pipeline import stages_of
from allranks.planning.setting import Setting
from allranks.shape_operations import Program
from tests.planning.profiles import cluster, cost_of

GPT = ModelShape("gpt", 8, 1024, 16, 4096, 32768, seq=1024, dropout=True)
MIXED = Mechanisms(
    fused_attention=False, attention_dropout=True, fusion=0.7, weight_bytes=2, gradient_bytes=2, optimizer_bytes=12,
    gather_bytes=2, reduce_bytes=2, selective="attention", pipeline_outputs=False, temporary_gradient_bytes=0,
)  # fmt: skip


def use_of(stage: int = 0, how: Mechanisms = MIXED, **given: Any) -> MemoryUse:
    setting = Setting(**{"global_batch": 64, "micro_batch": 1, "mechanisms": how, **given})
    profile, where = GPT.profile(program=Program(fused=True)), cluster(nodes=8)
    axes = axes_of(where, setting)
    costs = [cost_of(block, setting, axes) for block in profile.blocks]
    return memory_use(profile, setting, costs, stages_of(profile, setting.pp, setting.chunks)[stage], stage)


def test_mixed_adam_takes_16_bytes_for_a_parameter() -> None:
    use = use_of()
    # ZeRO 1910.02054, section 3.1: 2 + 2 + 12.
    assert use.weights + use.gradients + use.optimizer == 16 * GPT.parameters


@pytest.mark.parametrize(("zero", "each"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_zero_divides_what_its_stage_divides(zero: int, each: float) -> None:
    use = use_of(dp=64, shard=64, zero=zero)
    # ZeRO, figure 1, with 64 ranks.
    assert use.weights + use.gradients + use.optimizer == pytest.approx(each * GPT.parameters)


def test_activations_of_a_layer_without_recompute() -> None:
    seq, hidden, heads = 1024, 1024, 16
    # 2205.05198, equation 1: s b h (34 + 5 a s / h), and the softmax statistics that a fused kernel would keep.
    layer = seq * hidden * (34 + 5 * heads * seq / hidden) + 4 * seq * heads
    eight = use_of().activations
    four = replace(GPT, layers=4)
    setting = Setting(global_batch=64, micro_batch=1, mechanisms=MIXED)
    axes = axes_of(cluster(), setting)
    assert cost_of(four.profile(program=Program(fused=True)).blocks[1], setting, axes).kept_bytes == layer
    assert eight > 8 * layer


def test_selective_recompute_drops_the_scores() -> None:
    seq, heads = 1024, 16
    kept, selective = use_of().activations, use_of(recompute="selective").activations
    # All eight layers drop 5 a s^2; the peak is where the logits are, before any layer's backward has its scores back.
    assert kept - selective == 8 * 5 * heads * seq * seq


def test_full_recompute_keeps_the_inputs_alone() -> None:
    setting = Setting(global_batch=64, micro_batch=1, recompute="full", mechanisms=MIXED)
    cost = cost_of(GPT.profile(program=Program(fused=True)).blocks[1], setting, axes_of(cluster(), setting))
    assert cost.kept_bytes == 2 * 1024 * 1024  # 2 s b h


def test_sequence_parallelism_divides_all_of_a_layer() -> None:
    how = replace(MIXED, sequence_parallel=True)
    layer = GPT.profile(program=Program(fused=True)).blocks[1]
    kept = []
    for tp in (1, 4):
        setting = Setting(global_batch=64, micro_batch=1, tp=tp, mechanisms=how)
        kept.append(cost_of(layer, setting, axes_of(cluster(), setting)).kept_bytes)
    assert kept[1] == pytest.approx(kept[0] / 4)  # 2205.05198, equation 4


def test_tensor_parallelism_alone_leaves_ten_of_thirtyfour() -> None:
    layer = GPT.profile(program=Program(fused=True)).blocks[1]
    setting = Setting(global_batch=64, micro_batch=1, tp=4, mechanisms=MIXED)
    kept = cost_of(layer, setting, axes_of(cluster(), setting)).kept_bytes
    seq, hidden, heads = 1024, 1024, 16
    # 2205.05198, equation 2: s b h (10 + 24 / t + 5 a s / (h t)).
    assert kept == seq * hidden * (10 + 24 / 4 + 5 * heads * seq / hidden / 4) + 4 * seq * heads / 4


def test_the_first_stage_holds_the_most_micro_steps() -> None:
    first, second = use_of(0, pp=4, global_batch=64), use_of(1, pp=4, global_batch=64)
    assert first.activations > second.activations * 1.2
    gpipe = use_of(0, pp=4, schedule="gpipe")
    assert gpipe.activations > 10 * first.activations


def test_fsdp_gathers_two_blocks_and_reduces_one() -> None:
    use = use_of(dp=8, shard=8, zero=3)
    largest = 32768 * 1024 + 0  # the embedding; positions come with it
    assert use.gathered == (2 * 2 + 2) * (largest + 1024 * 1024)
    ahead = use_of(dp=8, shard=8, zero=3, prefetch=3)
    assert ahead.gathered == (4 * 2 + 2) * (largest + 1024 * 1024)
    kept = use_of(dp=8, shard=8, zero=3, keeps_gathered=True)
    assert kept.gathered == 2 * GPT.parameters


def test_logits_of_the_last_stage() -> None:
    use = use_of(3, pp=4, how=replace(MIXED, logits_copies=3.0))
    assert use.logits == 12 * 1024 * 32768


def test_frozen_parameters_have_no_gradients() -> None:
    use = use_of(frozen=True)
    assert (use.gradients, use.optimizer, use.weights) == (0.0, 0.0, 2 * GPT.parameters)


def test_the_allocator_gives_back_what_the_device_lacks() -> None:
    use = MemoryUse(weights=50.0, activations=100.0)
    setting = Setting(global_batch=1, micro_batch=1, mechanisms=replace(MIXED, slack=0.1))
    assert slack_bytes(setting, use, 1000.0) == pytest.approx(10.0)
    assert slack_bytes(setting, use, 155.0) == 5.0
    assert slack_bytes(setting, use, 100.0) == 0.0
