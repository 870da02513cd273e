"""What a Choice means: degrees, sharding stages and bytes for a parameter."""

from dataclasses import replace

import pytest

from allranks.plan import Choice
from allranks.planning.setting import Mechanisms, Setting, mechanisms_of, setting_of
from tests.planning.profiles import choose


def test_degrees_and_modes_pass_through() -> None:
    got = setting_of(choose(64, 2, dp_replicate=2, dp_shard=4, tp=2, pp=2, ep=2, recompute="full"))
    assert (got.dp, got.tp, got.pp, got.ep, got.shard, got.micro_batch) == (8, 2, 2, 2, 4, 2)
    assert (got.recompute, got.micro_steps, got.schedule) == ("full", 4, "1f1b")


@pytest.mark.parametrize(
    ("sharding", "zero", "keeps"), [("full", 3, False), ("grad_op", 3, True), ("optimizer", 1, False)]
)
def test_what_each_sharding_shares(sharding: str, zero: int, keeps: bool) -> None:
    got = setting_of(choose(dp_shard=8, sharding=sharding))
    assert (got.zero, got.shard, got.keeps_gathered) == (zero, 8, keeps)


def test_copies_share_nothing() -> None:
    got = setting_of(choose(dp_replicate=8))
    assert (got.zero, got.shard) == (0, 1)


def test_interleaved_schedules_have_two_chunks() -> None:
    assert setting_of(choose(pp=4, schedule="interleaved")).chunks == 2
    assert setting_of(choose(pp=4)).chunks == 1


def test_budget_is_estimated_as_selective() -> None:
    assert setting_of(choose(recompute="budget", compile="block")).recompute == "selective"


def test_float32_parameters_whatever_the_precision() -> None:
    ddp = mechanisms_of(choose(dp_replicate=8))
    # Law 7: parameters, gradients and both moments of Adam in float32; autocast's copies of the weights beside them.
    assert (ddp.weight_bytes, ddp.gradient_bytes, ddp.optimizer_bytes, ddp.cast_bytes) == (4, 4, 8, 2)
    fsdp = mechanisms_of(choose(dp_shard=8))
    assert (fsdp.gather_bytes, fsdp.reduce_bytes, fsdp.cast_bytes) == (2, 4, 0)
    exact = mechanisms_of(choose(dp_shard=8, gather="float32"))
    assert exact.gather_bytes == 4
    double = mechanisms_of(replace(choose(dp_replicate=2), precision="float64"))
    assert (double.weight_bytes, double.optimizer_bytes, double.cast_bytes) == (8, 16, 0)


def test_a_compressing_hook_halves_the_traffic() -> None:
    assert mechanisms_of(choose(dp_replicate=8, ddp_hook="bfloat16")).reduce_bytes == 2
    assert mechanisms_of(choose(dp_replicate=8)).reduce_bytes == 4


def test_a_last_micro_step_may_be_short() -> None:
    choice = choose(60, 8, dp_replicate=4)
    assert setting_of(choice).micro_steps == choice.micro_steps == 2
    assert Setting(global_batch=1, micro_batch=4).micro_steps == 1


def test_sequence_parallelism_needs_tp() -> None:
    how = Mechanisms(sequence_parallel=True, tensor_in_experts=True)
    assert not Setting(8, 1, mechanisms=how).sequence_parallel
    assert Setting(8, 1, tp=2, mechanisms=how).sequence_parallel
    assert (how.expert_tensor(4), Mechanisms().expert_tensor(4)) == (4, 1)


def test_a_choice_keeps_its_chunks() -> None:
    made = choose(pp=4, schedule="interleaved")
    assert setting_of(Choice(made.layout, 64, 1, chunks=5)).chunks == 5


def test_the_ranks_of_a_sequence_share_what_fsdp_shards() -> None:
    assert setting_of(choose(dp_shard=4, cp=2)).shard == 8
    assert setting_of(choose(dp_shard=4, cp=2, sharding="grad_op")).shard == 8
    assert setting_of(choose(dp_shard=4, cp=2, sharding="optimizer")).shard == 4
    assert setting_of(choose(dp_replicate=4, cp=2)).shard == 1


def test_experts_that_ep_cuts_are_shared_no_further() -> None:
    own = setting_of(choose(dp_shard=8, ep=4))
    assert own.expert_shards == 1
    assert replace(own, mechanisms=Mechanisms()).expert_shards == 2
    assert setting_of(choose(dp_shard=8)).expert_shards == 8


def test_tensor_parallelism_makes_its_loss_operation_by_operation() -> None:
    how = mechanisms_of(choose(tp=2))
    assert how.cut_logits_copies > how.logits_copies == Mechanisms().logits_copies


def test_what_a_norm_keeps_is_cut_where_products_keep_all_of_it() -> None:
    assert setting_of(choose(tp=2)).cuts_positions and not setting_of(choose(tp=2)).sequence_parallel
    assert not setting_of(choose(dp_shard=2)).cuts_positions
    assert not setting_of(choose(tp=2, pp=2)).cuts_positions  # stages send whole activations
    assert not replace(setting_of(choose(tp=2)), mechanisms=Mechanisms()).cuts_positions
