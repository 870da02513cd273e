"""One rank's step without its world: what repeats is traced once, and nothing else differs from the full trace."""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from allranks.errors import ConfigError
from allranks.losses import cross_entropy
from allranks.rehearsal import RankRehearsal
from allranks.rehearsing.dryrun import WORKSPACE_BYTES, collecting_new
from allranks.stepping.spikes import STORED
from allranks.task import Hints, Task
from tests.rehearsing.tasks import Experts, Normed, Stepping, Tokens, rehearsed

EVERY_AXIS = [
    (Tokens, "ddp", 4),
    (Tokens, "fsdp", 4),
    (Tokens, "fsdp,sharding=grad_op,recompute=full", 4),
    (Tokens, "dp_replicate=2,dp_shard=2", 4),
    (Tokens, "dp_shard=4,sharding=optimizer", 4),
    (Tokens, "tp=2,dp_shard=2", 4),
    (Tokens, "cp=2,dp_shard=2", 4),
    (Experts, "dp_shard=4,ep=2", 4),
    (Tokens, "pp=2,dp_shard=2", 4),
]

OTHERS = ["dp_shard=2,sharding=grad_op", "dp_shard=2,recompute=full", "dp_replicate=2,dp_shard=2"]


def totals(told: RankRehearsal) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, op) -> (bytes, count)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for one in told.collectives:
        num_bytes, count = found.get((one.axis, one.op), (0, 0))
        found[one.axis, one.op] = num_bytes + one.bytes, count + one.count
    return found


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "world"), EVERY_AXIS[5:6])
def test_a_short_trace_agrees_with_the_full_one(kind: type[Tokens], layout: str, world: int) -> None:
    check_short(kind, layout, world)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "layout", "world"), EVERY_AXIS)
def test_a_short_trace_agrees_with_the_full_one_on_every_axis(kind: type[Tokens], layout: str, world: int) -> None:
    check_short(kind, layout, world, "train.global_batch=16")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp_shard=4,ep=2,recompute=full", "dp_replicate=2,ep=2"])
def test_experts_that_are_left_out_have_one_gradient(layout: str) -> None:
    """Which their reduction would make again of zeros: the peak lies there."""
    world = 4 if "dp_shard" in layout else 2
    task = Experts(layers=9, hidden=128, seq=8)
    assert check_short_of(task, layout, world) == (4, 9)
    assert rehearsed(task, layout, world).at.startswith("backward of ")


class Strided(Task):
    """Ten convolutions, of which some halve what they are given: they differ in tuples alone."""

    defaults: ClassVar[Mapping[str, object]] = {"train.steps": 4, "train.global_batch": 32}

    strides: str = "1112111111"

    def model(self) -> nn.Module:
        blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, int(s), padding=1), nn.ReLU()) for s in self.strides]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))

    def dataset(self, split: str) -> Any:
        return [(torch.zeros(8, 32, 32), 3)] * 64 if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_convolutions_of_another_stride_are_no_repeats(layout: str) -> None:
    assert check_short_of(Strided(), layout, 4) == (8, 10)
    assert check_short_of(Strided(strides="1111211111"), layout, 4) == (10, 10), "five and four are too few"


class Pretrained(Tokens):
    """Of Hugging Face's, whose layers have their number as an attribute."""

    def model(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": self.vocab}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        built: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=self.layers))
        return built

    def inputs(self, batch: Any) -> Any:
        return {"input_ids": batch["tokens"], "use_cache": False}

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(output.logits, batch["y"])

    def hints(self) -> Hints:
        return Hints()


@pytest.mark.full
def test_layers_that_know_their_number_are_repeats() -> None:
    pytest.importorskip("transformers")
    assert check_short_of(Pretrained(layers=9), "fsdp", 2) == (4, 9)


def test_every_message_has_the_ranks_that_take_part() -> None:
    told = rehearsed(Tokens(), "tp=2,dp_shard=2", 4)
    assert {(one.axis, one.members, one.ranks) for one in told.collectives} == {
        ("tp", "0-1", 2),
        ("dp_shard", "0,2", 2),
    }


def test_a_deep_model_is_traced_no_further_than_a_shallow_one() -> None:
    """What it takes to trace is bounded, and what a block adds is added for each."""
    some, more, deep = (rehearsed(Tokens(layers=layers), "fsdp", 2) for layers in (9, 12, 24))
    assert [told.traced for told in (some, more, deep)] == [4, 4, 4]
    assert [told.blocks for told in (some, more, deep)] == [9, 12, 24]
    per_block = (more.resting_bytes - some.resting_bytes) / 3, (more.flops - some.flops) / 3
    assert deep.resting_bytes == more.resting_bytes + 12 * per_block[0]
    assert deep.flops == more.flops + 12 * per_block[1]


def check_short(kind: type[Tokens], layout: str, world: int, *overrides: str) -> None:
    """Of nine blocks (of a stage: at least six) some are traced."""
    traced, blocks = check_short_of(kind(layers=12 if "pp" in layout else 9), layout, world, *overrides)
    assert traced < blocks


def check_short_of(task: Task, layout: str, world: int, *overrides: str) -> tuple[int, int]:
    """(Blocks that the short trace traced, all), where it says what the full one does."""
    short, full = (rehearsed(task, layout, world, *overrides, full=full) for full in (False, True))
    assert short.blocks == full.traced
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)
    # A stage that waits for another one's loss may keep one number more.
    assert short.resting_bytes == pytest.approx(full.resting_bytes, abs=4 if "pp" in layout else 0)
    assert short.flops == full.flops
    assert totals(short) == totals(full)
    return short.traced, short.blocks


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp_shard=2", *OTHERS])
def test_what_a_micro_step_reduces_last_is_in_a_short_trace_too(layout: str) -> None:
    """The head's, which is most of this model: FSDP2 drops it when the next micro-step reduces its last block."""
    task, words = Tokens(layers=6, vocab=2048), ("train.micro_batch=1", "train.precision=bfloat16")
    world = 4 if "dp_replicate" in layout else 2
    full, short, alone = (
        rehearsed(task, layout, world, f"train.global_batch={batch}", *words, full=full, on_cuda=True)
        for full, batch in ((True, 2 * world), (False, 2 * world), (False, world))
    )
    assert short.traced < short.blocks == full.traced
    assert full.peak_bytes == pytest.approx(short.peak_bytes, rel=0.01)
    assert (alone.peak_bytes - WORKSPACE_BYTES) * 1.05 < full.peak_bytes - WORKSPACE_BYTES


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_copies_of_autocast_are_dropped_in_a_short_trace_too(recompute: str) -> None:
    words = (f"single,recompute={recompute}", 1, "train.precision=bfloat16")
    short, full = (rehearsed(Tokens(layers=8, hidden=128), *words, full=full, on_cuda=True) for full in (False, True))
    assert (short.traced, full.traced) == (4, 8)
    assert short.peak_bytes == full.peak_bytes


def test_what_ddp_sums_before_its_last_micro_step_is_gradients() -> None:
    told = rehearsed(Tokens(layers=1, seq=128), "ddp", 2, "train.global_batch=4", "train.micro_batch=1")
    assert told.at == "backward of the loss"
    assert told.by_category["gradients"] == pytest.approx(told.by_category["optimizer"], rel=1e-3)


@pytest.mark.full
def test_micro_steps_that_are_alike_are_counted() -> None:
    task, words = Tokens(layers=1), ("train.global_batch=10", "train.micro_batch=1")
    short, full = (rehearsed(task, "fsdp", 2, *words, full=full) for full in (False, True))
    assert short.micro_steps == full.micro_steps == 5
    assert short.flops == full.flops
    assert totals(short) == totals(full)
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)


@pytest.mark.full
def test_ranges_that_a_rollback_left_out_are_not_those_of_a_shorter_step() -> None:
    words = ("train.global_batch=10", "train.micro_batch=1")
    whole, after = (rehearsed(Tokens(layers=1), "fsdp", 2, *words, *more) for more in ((), ("data.skip=10:30",)))
    assert after.peak_bytes == whole.peak_bytes and after.micro_steps == 5


@pytest.mark.parametrize(
    ("kind", "layout", "word"),
    [
        (Stepping, "ddp", "guard.spike=rollback"),
        (Stepping, "ddp", "guard.recompute_every=5"),
        (Tokens, "pp=2", "guard.recompute_every=5"),
    ],
)
def test_guards_that_training_refuses_are_refused(kind: type[Tokens], layout: str, word: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(word)):
        rehearsed(kind(layers=2), layout, 2, word)


class InBfloat16(Tokens):
    """Whose model comes in another type than it is trained in, as Hugging Face's do."""

    def model(self) -> Any:
        return super().model().to(torch.bfloat16)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "precision", "times"), [(Tokens, "float64", 2), (InBfloat16, "float32", 1)])
def test_a_model_in_another_type_than_the_precisions(kind: type[Tokens], precision: str, times: int) -> None:
    told = rehearsed(kind(), "fsdp", 2, f"train.precision={precision}")
    whole = rehearsed(Tokens(), "fsdp", 2, "train.precision=float32")
    assert told.by_category["weights"] == times * whole.by_category["weights"]
    assert told.by_category["optimizer"] == pytest.approx(times * whole.by_category["optimizer"], rel=1e-2)


def test_what_a_shard_holds() -> None:
    task = Tokens()
    alone, shared = rehearsed(task, "single", 1), rehearsed(task, "fsdp", 4)
    parameters = sum(p.numel() for p in task.model().parameters())
    buffers = sum(b.nbytes for b in task.model().buffers())
    assert alone.by_category["weights"] == 4 * parameters + buffers
    assert alone.by_category["optimizer"] == pytest.approx(8 * parameters, rel=1e-3)
    assert shared.by_category["weights"] == parameters + buffers
    assert any(moment.what == "gather" and moment.num_bytes > 0 for moment in shared.moments)
    assert alone.collectives == ()


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_what_modules_hold_adds_up_to_the_peak(layout: str) -> None:
    """Each byte is some module's; activations are those of blocks, and of what stands before and behind them."""
    task = Tokens()
    told = rehearsed(task, layout, 2)
    by_category: Counter[str] = Counter()
    for one in told.holdings:
        by_category[one.category] += one.bytes
    assert sum(by_category.values()) == told.peak_bytes and dict(by_category) == told.by_category
    activations = {one.module: one.bytes for one in told.holdings if one.category == "activations"}
    of_blocks = {name: num for name, num in activations.items() if name.startswith("layers.*")}
    assert activations.keys() - of_blocks.keys() <= {"embedding", "norm"}
    assert sum(of_blocks.values()) > 0.9 * sum(activations.values())
    width = 4 * task.hidden * 4  # of one position, in float32
    assert of_blocks["layers.*.feed_forward.gate"] == task.layers * 4 * task.seq * width


def test_every_message_has_the_line_that_asked_for_it() -> None:
    told = rehearsed(Tokens(), "tp=2,dp_shard=2", 4, on_cuda=True)
    assert {one.axis for one in told.collectives} == {"tp", "dp_shard"}
    assert {one.op for one in told.collectives} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert all(".py:" in one.line or one.line.startswith("backward of") for one in told.collectives)
    backward = [one.line for one in told.collectives if one.axis == "tp" and one.line.startswith("backward of layers")]
    assert backward and all(re.search(r", allranks/models/transformer.py:\d+ \w+$", line) for line in backward)
    gathers = [one for one in told.collectives if one.axis == "dp_shard" and one.line.startswith("allranks/models")]
    assert sum(one.count for one in gathers) == 3


def guarded(task: Task, layout: str, world: int, *words: str) -> int:
    """Bytes that the guard of a step keeps at its peak."""
    return sum(one.bytes for one in rehearsed(task, layout, world, *words).holdings if one.module == "the guard")


@pytest.mark.full
def test_the_guard_keeps_the_buffers_that_a_step_changes() -> None:
    """And small ones, which a later step may change: the tables of rotary angles are, two of a kilobyte in a block."""
    widths = (2048, 16, 2048)
    learnt = sum(2 * 4 * width + 8 for width in widths)  # mean, variance and a counter
    for layout, world in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        assert guarded(Normed(), layout, world) == learnt
    tables = 2 * 32 * 8 * 4  # cosines and sines of a block: positions, half of a head's channels, float32
    assert guarded(Tokens(layers=2), "ddp", 2) == 2 * guarded(Tokens(layers=2), "pp=2", 2) == 2 * tables
    assert guarded(Tokens(layers=2), "ddp", 2, "train.precision=float16") == 2 * tables
    assert guarded(Tokens(layers=2), "ddp", 2, "guard.spike=skip") == 2 * tables + 8 * STORED + 8


def test_spikes_are_agreed_upon_once_a_step() -> None:
    plain, skipping = (totals(rehearsed(Tokens(), "ddp", 2, f"guard.spike={how}")) for how in ("log", "skip"))
    num_bytes, count = skipping.pop(("dp_replicate", "all-reduce"))
    assert plain.pop(("dp_replicate", "all-reduce")) == (num_bytes - 4, count - 1)
    assert plain == skipping


def test_a_step_of_its_own_is_traced_whole() -> None:
    told = rehearsed(Stepping(layers=7), "ddp", 2, "train.global_batch=6", "train.micro_batch=1")
    assert (told.traced, told.blocks, told.micro_steps) == (7, 7, 3)
    parameters = sum(p.numel() for p in Stepping(layers=7).model().parameters())
    reduced = sum(one.bytes for one in told.collectives if "average_gradients" in one.line)
    assert reduced == 2 * 4 * parameters  # in each of two turns


@pytest.mark.parametrize("words", [(), ("train.micro_batch=1",)])
def test_buckets_are_asked_for_by_ddps_reducer(words: tuple[str, ...]) -> None:
    """Not by what stands in its place here, which a profile of training does not show."""
    buckets = [one for one in rehearsed(Tokens(), "ddp", 2, *words).collectives if one.bytes > 4]
    assert [one.line for one in buckets] == ["backward of the model, DDP's reducer (torch.distributed.ddp.reducer)"]


def test_a_gpu_gathers_in_bfloat16() -> None:
    task, words = Tokens(), ("train.precision=bfloat16",)
    on_cpu, on_gpu = (rehearsed(task, "fsdp", 2, *words, on_cuda=on_cuda) for on_cuda in (False, True))
    gathers = ("broadcast", "all-gather")
    sizes = [
        sum(c.bytes for c in told.collectives if c.op in gathers and c.bytes > 4)  # but for the gradients' norm
        for told in (on_cpu, on_gpu)
    ]
    assert sizes[0] == 2 * sizes[1] > 0


@pytest.mark.full
def test_the_last_stage_has_the_logits() -> None:
    task = Tokens(layers=4)
    first, last = (rehearsed(task, "pp=2", 2, rank=rank) for rank in (0, 1))
    assert (first.stage, last.stage) == (0, 1)
    assert first.by_category.get("logits", 0) < 1000 < last.by_category["logits"]
    sent, received = totals(first)["pp", "send"], totals(last)["pp", "receive"]
    assert sent == received and sent[1] == first.micro_steps == 4
    assert totals(first)["pp", "receive"] == totals(last)["pp", "send"]


def test_collections_of_a_traced_step_look_at_what_it_makes() -> None:
    class Ring:
        def __init__(self) -> None:
            self.itself = self

    earlier = Ring()
    with collecting_new():
        assert gc.get_freeze_count() > 0
        made, kept = weakref.ref(Ring()), weakref.ref(earlier)
        del earlier
        gc.collect()
        assert made() is None and kept() is not None
    gc.collect()
    assert kept() is None and gc.get_freeze_count() == 0


def test_a_step_in_float16_is_one_that_counts() -> None:
    """Its optimizer has its state, and the ranks agree on whether the step is left out."""
    half, low = (
        rehearsed(Tokens(), "ddp", 2, f"train.precision={name}", "train.ema=0.9") for name in ("float16", "bfloat16")
    )
    assert half.by_category["optimizer"] == low.by_category["optimizer"] > 0
    extra = [one for one in half.collectives if one.bytes == 4]
    assert [(one.op, one.count, one.ranks) for one in extra] == [("all-reduce", 1, 2)]
