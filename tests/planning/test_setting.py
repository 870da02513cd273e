"""What a Choice means: degrees, sharding stages and bytes for a parameter."""

from dataclasses import replace

import pytest

from allranks.data.cut import Cut
from allranks.model_profile import Block, Operation
from allranks.plan import Choice
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.setting import Setting, setting_of
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


@pytest.mark.parametrize("size", [8, 9, 31, 72, 100])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_forward_has_the_samples_that_the_data_gives_it(size: int, ranks: int) -> None:
    """More than a rank's share no forward has, whatever `micro_batch` says, and two of 5 are not two of 8."""
    for micro_batch in range(1, 12):
        cut = Cut(size, ranks, micro_batch)
        longest = max(length for rank in range(ranks) for _, length in cut.spans(size, rank))
        found = setting_of(choose(size, micro_batch, dp_replicate=ranks))
        assert (found.micro_batch, found.micro_steps) == (longest, cut.num_micro_steps())


def test_experts_that_stay_are_cast_for_every_forward() -> None:
    """Under FSDP: what it gathers comes in the lower type, and DDP's copies are autocast's (models/moe.multiply)."""
    assert setting_of(choose(dp_shard=8, ep=8)).casts_experts
    assert not setting_of(choose(dp_shard=8)).casts_experts
    assert not setting_of(choose(dp_shard=8, ep=2)).casts_experts, "gathered, too"
    assert not setting_of(choose(dp_replicate=8, ep=2)).casts_experts
    assert not setting_of(replace(choose(dp_shard=8, ep=8), precision="float32")).casts_experts


def test_what_is_float32_under_autocast() -> None:
    """Norms; what goes from block to block where no weight is gathered in the lower type, or experts give it."""
    plain = Block("layer", (), low_stream=True)
    experts = replace(plain, operations=(Operation("up", "matmul", cut="expert"),))

    def widths(choice: Choice) -> tuple[float, int, float, float]:
        got = setting_of(choice)
        return got.width, got.widening, got.stream_widening(plain), got.stream_widening(experts)

    ddp, fsdp = choose(dp_replicate=8), choose(dp_shard=8)
    assert widths(ddp) == widths(choose(dp_shard=8, gather="float32")) == (2.0, 2, 2, 2)
    assert widths(fsdp) == (2.0, 2, 1, 2)
    assert widths(replace(fsdp, precision="float16")) == (2.0, 2, 2, 2), "gathered in float32"
    assert widths(replace(ddp, precision="float32")) == (4.0, 1, 1, 1)
    traced = replace(plain, low_stream=False, low_share=0.5)
    assert setting_of(ddp).stream_widening(traced) == 1, "traced as it is"
    assert setting_of(choose(dp_shard=8, gather="float32")).stream_widening(traced) == 1
    assert setting_of(replace(fsdp, precision="float16")).stream_widening(traced) == 1
    assert setting_of(fsdp).stream_widening(traced) == 0.5, "as a trace with gathered weights has it"
    assert Setting(8, 1).widening == 1, "of another framework"


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


def test_who_shares_the_experts_that_ep_cuts() -> None:
    """Of one copy those who hold the same ones, those of a sequence among them; of another framework, by ZeRO's stage.

    What plain copies, or ranks of which a copy has unequally many, hold is shared no further.
    """
    shares = {
        4.0: (choose(dp_shard=8, ep=2), choose(dp_shard=4, cp=2, ep=2), choose(dp_replicate=2, dp_shard=8, ep=2)),
        2.0: (choose(dp_shard=8, ep=4), choose(dp_replicate=2, dp_shard=2, cp=2, ep=4)),
        1.0: (
            *(choose(dp_shard=8, ep=8), choose(dp_replicate=2, dp_shard=3, ep=2), choose(dp_replicate=8, ep=4)),
            choose(dp_shard=8, ep=4, sharding="optimizer"),
        ),
    }
    for expected, choices in shares.items():
        for choice in choices:
            found = setting_of(choice)
            assert (found.expert_shards, found.experts_whole) == (expected, expected == 1), choice.layout
            assert found.expert_shards == choice.layout.expert_shards
    own = setting_of(choose(dp_shard=8, ep=4, sharding="optimizer"))
    assert replace(own, mechanisms=Mechanisms()).expert_shards == 2
    assert setting_of(choose(dp_shard=8)).expert_shards == 8


def test_what_a_norm_keeps_is_cut_where_products_keep_all_of_it() -> None:
    assert setting_of(choose(tp=2)).cuts_positions and not setting_of(choose(tp=2)).sequence_parallel
    assert not setting_of(choose(dp_shard=2)).cuts_positions
    assert not setting_of(choose(tp=2, pp=2)).cuts_positions  # stages send whole activations
    assert not replace(setting_of(choose(tp=2)), mechanisms=Mechanisms()).cuts_positions
