"""When a step is fullest: by hand for a model of round numbers, and beside dry runs of the program itself."""

import importlib
from typing import Any

import pytest

from allranks.cli.rehearsed_question import Asked, choice_of, profile_of, question_of
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.planning.estimate import estimate
from allranks.planning.moments import Held, Moment, Places, moments
from allranks.planning.setting import Setting, setting_of
from allranks.rehearsing.dryrun import WORKSPACE_BYTES
from allranks.rehearsing.whole import rehearse

PLACES = Places(around=30, before=10, head=20, block=7, last=2, whole=100)
HELD = Held(
    has=PLACES, makes=PLACES, casts=85, block_casts=6, casts_around=20, gradient_bytes=400, expert_gradient_bytes=0,
    kept_bytes=1000, one_kept_bytes=1000, first_kept_bytes=100, times=1, apart=0, apart_made=0,
    working_bytes=50, head_bytes=300, logits_bytes=600, other_logits_bytes=0,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Fake tensors import this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    importlib.import_module("torch._dynamo")


def setting(micro_steps: int = 1, precision: str = "bfloat16", **layout: Any) -> Setting:
    found = Layout(**layout)
    return setting_of(Choice(found, micro_steps * found.dp, 1, precision))


def has(moment: Moment, *where: tuple[Setting, Held]) -> bool:
    return all(moment in list(moments(*each)) for each in where)


def test_no_gradients_are_there_at_the_first_loss() -> None:
    shards = HELD._replace(gradient_bytes=200)
    assert has(Moment(0, 1000, 600, 60), (setting(dp_shard=2), shards))  # what is around the blocks, in 2 bytes each
    assert has(Moment(0, 1000, 600, 120), (setting(dp_shard=2, precision="float32"), shards))
    assert has(Moment(0, 1000, 600, 200), (setting(dp_shard=2, sharding="grad_op"), shards))


def test_what_was_reduced_last_is_kept_for_the_next_micro_step() -> None:
    """So that its forward need not wait: FSDP2 drops it when the next backward reduces its first block."""
    shards = HELD._replace(gradient_bytes=200)
    assert has(Moment(200, 1000, 600, 60, 30 * 4), (setting(2, dp_shard=2), shards))
    assert has(Moment(200, 0, 0, (30 + 7) * 2, 30 * 4 + (30 + 7) * 2), (setting(2, dp_shard=2), shards))
    assert has(Moment(200 + (20 + 2) * 2, 1050, 0, 60 + 14, 30 * 4 + 14), (setting(2, dp_shard=2), shards))
    alone = Moment(0, 1000, 600, 60)
    assert has(alone, (setting(dp_shard=2), shards)) and not has(alone, (setting(2, dp_shard=2), shards))


def test_a_block_works_while_its_neighbours_travel() -> None:
    """Its gradient of the last product beside the head's; the one before is reduced, the next one gathered."""
    shards = HELD._replace(gradient_bytes=200)
    assert has(Moment((20 + 2) * 2, 1050, 0, 60 + 14, 7 * 4 + 14), (setting(dp_shard=2), shards))
    kept = Moment((20 + 2) * 2, 1050, 0, 200, 7 * 4)
    assert has(kept, (setting(dp_shard=2, sharding="grad_op"), shards))
    late = Moment(200 * 0.7 - 14 + 44, 150, 0, 60 + 14, 7 * 4 + 14)  # all shards but the rest's and the block's own
    assert has(late, (setting(dp_shard=2), shards))


def test_the_rest_is_reduced_last() -> None:
    shards = HELD._replace(gradient_bytes=200)
    assert has(Moment(140 + 60, 0, 0, 0, 120), (setting(dp_shard=2), shards))
    assert has(Moment(200 + 60, 0, 0, 0, 120), (setting(2, dp_shard=2), shards))


def test_the_update_has_all_gradients() -> None:
    assert has(Moment(400), (setting(dp_replicate=2), HELD), (setting(), HELD), (setting(dp_shard=2), HELD))


def test_ddp_has_its_buckets_always_and_sums_beside_them() -> None:
    loss = Moment(400, 1000, 600, 170)
    assert has(loss, (setting(dp_replicate=2), HELD))
    assert has(loss._replace(gradients=800), (setting(2, dp_replicate=2), HELD))
    assert has(loss._replace(gradients=0), (setting(tp=2), HELD))
    experts = HELD._replace(expert_gradient_bytes=40)
    assert has(loss._replace(gradients=400), (setting(dp_replicate=2), experts))  # no bucket has them
    assert has(loss._replace(gradients=840), (setting(2, dp_replicate=2), experts))


def test_autocast_drops_its_copies_at_the_end_of_a_forward_that_is_recomputed() -> None:
    again = setting(dp_replicate=2, recompute="full")
    assert has(Moment(400, 1000, 0, 170), (again, HELD))
    assert has(Moment(400, 1000, 600, 40), (again, HELD))
    assert not has(Moment(400, 1000, 600, 170), (again, HELD))


def test_micro_steps_under_way_keep_their_own_copies() -> None:
    deep = HELD._replace(times=3, kept_bytes=3000)
    assert has(Moment(400, 3000, 600, 3 * 170), (setting(8, pp=2), deep))
    assert has(Moment(400, 2150, 0, 2 * 170 + 12), (setting(8, pp=2), deep))


NEAR = 0.03
SMALL = ("llama3-8b", "task.layers=4", "task.seq=1024")
MIXED = ("mixtral-8x7b", "task.layers=3", "task.seq=1024")
OWN = ("task.hidden=256", "task.seq=256", "task.vocab=4096", "train.global_batch=16", "train.precision=bfloat16")
TASK, CUT_LOSS = (("tests.rehearsing.tasks:Tokens", *OWN), ("tests.rehearsing.tasks:CutLoss", *OWN))
RESTORED = ("tests.rehearsing.tasks:Restored",)
FIRST = [
    (RESTORED, "ddp", ()),
    (TASK, "tp=4,dp_shard=2", ()),
    (SMALL, "ddp", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "fsdp,recompute=full", ("train.global_batch=16", "train.micro_batch=2")),
    (SMALL, "fsdp,recompute=full", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "tp=8", ("train.global_batch=1",)),
]
OTHERS = [
    (RESTORED, "ddp", ("train.precision=bfloat16",)),
    (RESTORED, "fsdp", ()),
    (RESTORED, "fsdp", ("train.precision=bfloat16",)),
    (TASK, "ddp", ()),
    (TASK, "fsdp", ()),
    (TASK, "tp=2,dp_replicate=4", ()),
    (CUT_LOSS, "tp=4,dp_shard=2", ()),
    (CUT_LOSS, "tp=2,dp_replicate=4", ()),
    (SMALL, "ddp,recompute=full", ("train.global_batch=8",)),
    (SMALL, "ddp,recompute=selective", ("train.global_batch=8",)),
    (SMALL, "fsdp", ("train.global_batch=8", "train.precision=float32")),
    (SMALL, "fsdp,sharding=grad_op", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "fsdp", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "fsdp", ("train.global_batch=24", "train.micro_batch=1", "train.precision=float32")),
    (SMALL, "dp_replicate=2,dp_shard=4", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "tp=2,dp_shard=4", ("train.global_batch=16", "train.micro_batch=1")),
    (SMALL, "dp_shard=8,sharding=optimizer", ("train.global_batch=8",)),
    (SMALL, "dp_replicate=2,dp_shard=4", ("train.global_batch=8",)),
    (SMALL, "tp=8,recompute=full", ("train.global_batch=4",)),
    (SMALL, "tp=2,dp_shard=4", ("train.global_batch=4", "train.precision=float32")),
    (SMALL, "cp=2,dp_shard=4", ("train.global_batch=8",)),
    (SMALL, "tp=2,cp=2,dp_shard=2", ("train.global_batch=2",)),
    (SMALL, "pp=2,tp=2,dp_shard=2,sharding=grad_op", ("train.global_batch=8", "train.micro_batch=1")),
    (SMALL, "pp=2,dp_replicate=4", ("train.global_batch=16", "train.micro_batch=1")),
    (MIXED, "dp_replicate=8,ep=8", ("train.global_batch=8",)),
    (MIXED, "dp_shard=8,ep=4", ("train.global_batch=8",)),
    (MIXED, "dp_shard=8,ep=2", ("train.global_batch=8",)),
    (MIXED, "dp_replicate=2,dp_shard=4,ep=2", ("train.global_batch=8",)),
]


def check_against_a_dry_run(model: tuple[str, ...], layout: str, words: tuple[str, ...]) -> None:
    question = question_of(Asked((*model, *words), "1x8:h200", layout, "kinds"))
    told = max(rank.peak_bytes for rank in rehearse(question).ranks.values())
    memory = estimate(profile_of(question), question.cluster, choice_of(question)).memory
    of_libraries = memory.framework - WORKSPACE_BYTES  # the dry run counts cuBLAS's by itself
    assert memory.total - of_libraries == pytest.approx(told, rel=NEAR)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("model", "layout", "words"), FIRST)
def test_a_plan_holds_what_the_program_holds(model: tuple[str, ...], layout: str, words: tuple[str, ...]) -> None:
    check_against_a_dry_run(model, layout, words)


@pytest.mark.full
@pytest.mark.parametrize(("model", "layout", "words"), OTHERS)
def test_a_plan_holds_what_the_program_holds_on_every_axis(
    model: tuple[str, ...], layout: str, words: tuple[str, ...]
) -> None:
    check_against_a_dry_run(model, layout, words)


def test_losses_of_other_micro_steps_wait_for_their_backwards() -> None:
    """Where all forwards come first; not beside the update, nor before the first of them."""
    other = HELD._replace(other_logits_bytes=9)
    for given in (setting(pp=2, schedule="gpipe"), setting(pp=2, dp_shard=2)):
        for plain, found in zip(moments(given, HELD), moments(given, other), strict=True):
            assert found.logits - plain.logits == (9 if plain.activations else 0)
    assert next(moments(setting(), other)).total == HELD.gradients


def test_experts_that_are_gathered_by_themselves_are_not_there_when_they_are_reduced() -> None:
    """Of a block of 7 they are 4: the next block's other 3 come while they work, and their buffer stays in forwards."""
    apart = HELD._replace(apart=4, apart_made=4)
    given = setting(dp_shard=4, ep=2)
    wide, reduces = given.mechanisms.gather_bytes, given.mechanisms.reduce_bytes
    assert given.experts_apart and given.mechanisms.gradient_bytes == 4
    reduced = 400 - 4 * 30 / 4  # what stands around them is shared by all four
    last, first = (20 + 4) * wide, reduced - (400 - 30) * 7 / 70
    assert has(Moment(last, 1000, 0.0, (30 + 7 - 4) * wide, 4 * reduces + 3 * wide), (given, apart))
    assert has(Moment(first + last, 100, 0.0, (30 + 7 - 4) * wide, 4 * reduces), (given, apart))
    assert has(Moment((20 + 2) * wide, 1050, 0.0, (30 + 7) * wide, 4 * wide), (given, apart))


def test_what_shards_are_multiplied_in_is_copied_where_they_are_not_gathered_in_it() -> None:
    """autocast's copies stay until the backward (float16); under recompute those of one block alone."""
    low, half = setting(dp_shard=2), setting(dp_shard=2, precision="float16")
    assert max(m.activations for m in moments(half, HELD)) - max(m.activations for m in moments(low, HELD)) == 2 * 85
    low, half = (setting(dp_shard=2, recompute="full", precision=name) for name in ("bfloat16", "float16"))
    most = HELD._replace(working_bytes=900)
    grown = max(m.activations for m in moments(half, most)) - max(m.activations for m in moments(low, most))
    assert grown == 2 * 20 + 2 * 6
