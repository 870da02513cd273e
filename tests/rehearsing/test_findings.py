"""What would have failed on the cluster is found, and each message names the move that mends it."""

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from allranks.errors import ConfigError, LayoutError, TaskError
from allranks.hints import Hints, TensorStyle
from allranks.rehearsing.refusals import Unrehearsable
from allranks.rehearsing.world_of_ranks import choose_ranks
from tests.rehearsing.tasks import Adversaries, Calling, Layered, Stepping, Tokens, branch, configured, mixed, rehearsed


class Branching(Layered):
    """Its forward branches on a value."""

    def middle(self) -> nn.Module:
        return Calling(branch)


class Mixed(Layered):
    """Two types meet in a product."""

    def middle(self) -> nn.Module:
        return Calling(mixed)


class ShortLabels(Layered):
    """Its labels are integers of 32 bits."""

    def dataset(self, split: str) -> Any:
        short = torch.tensor(3, dtype=torch.int32)
        return [(row, short) for row, _ in super().dataset(split)] if split == "train" else None


class Misshapen(Layered):
    """Two layers that do not fit each other."""

    def middle(self) -> nn.Module:
        return nn.Linear(self.width, self.width + 1)


class Forgetful(Tokens):
    """Its plan forgets the feed-forwards."""

    style: ClassVar[dict[str, TensorStyle]] = {}

    def hints(self) -> Hints:
        plan = {name: style for name, style in super().hints().tensor.items() if "feed_forward." not in name}
        return Hints(blocks=("layers.*",), tensor={**plan, **self.style})


class Whole(Forgetful):
    """Its plan leaves the feed-forwards whole."""

    style: ClassVar[dict[str, TensorStyle]] = {"layers.*.feed_forward": "replicate"}


class Hinting(Tokens):
    """Its hint names blocks that are not there."""

    def hints(self) -> Hints:
        return Hints(blocks=("blocks.*",))


class Row(nn.Module):
    """A large parameter whose first dim has few rows."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(rows, 8192 // rows, width))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.row.sum((0, 1))


class Rowed(Layered):
    """Has such a parameter."""

    rows: int = 1

    def middle(self) -> nn.Module:
        return Row(self.rows, self.width)


class Misled(Layered):
    """Its hints are for another model."""

    def hints(self) -> Hints:
        return Hints(tensor={"layers.*.up": "colwise"}, split_before=("blocks.3",), sequence_dims={"z": 1})


class Led(Layered):
    """Its hints match."""

    def hints(self) -> Hints:
        return Hints(tensor={"0": "colwise", "2": "rowwise"}, split_before=("2",), sequence_dims={"0": 1})


class Idle(Layered):
    """Keeps a layer that the loss does not reach."""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_module("idle", nn.Linear(4, 4))
        model.forward = lambda value: model[2](model[1](model[0](value)))  # type: ignore[index]
        return model


class Several(Layered):
    """Two models, and no step."""

    def model(self) -> Any:
        return {"one": super().model(), "two": nn.Linear(2, 2)}


class Coupled(Tokens):
    """Its loss couples samples, says its author."""

    coupled = True


BROKEN = [
    (
        "a branch on a value",
        Branching,
        "ddp",
        4,
        (),
        Unrehearsable,
        r"branch on a tensor.*tasks.py:\d+.*by torch.where instead",
    ),
    (
        "two types",
        Mixed,
        "ddp",
        4,
        (),
        TaskError,
        r"of one dtype, and gets float32 and float64 \(in 1, tasks.py:\d+\); mend it there: it fails on one process",
    ),
    (
        "labels of a type that no loss takes",
        ShortLabels,
        "ddp",
        4,
        (),
        TaskError,
        r"nll_loss_forward refuses float32 and int32: expected (target dtype to be Long or Byte, but got Int|"
        r"scalar type Long but found Int); it takes float32 and int64 \(in loss, tasks.py:\d+\); mend it there",
    ),
    ("shapes", Misshapen, "ddp", 4, (), TaskError, r"would fail: .*33\].*\(in 2\); mend it there: it fails on one"),
    (
        "a hint for nothing",
        Hinting,
        "fsdp",
        4,
        (),
        LayoutError,
        r"hints\(\).blocks: 'blocks.\*' matches no module.*the nearest are layers.2, layers.1, layers.0",
    ),
    (
        "more stages than blocks",
        Tokens,
        "pp=4",
        4,
        (),
        LayoutError,
        r"begins at 4 blocks at least, .* use fewer stages",
    ),
    ("a world of another size", Tokens, "tp=3,dp_shard=2", 8, (), LayoutError, r"= 6, but the world has 8 .*tp=4 fits"),
    ("heads that do not divide", Tokens, "tp=8", 8, (), LayoutError, r"num_heads=4, .*tp can be 1, 2, 4"),
    (
        "layers without a rule",
        Forgetful,
        "tp=2",
        2,
        (),
        LayoutError,
        r"feed_forward.gate has parameters and no rule.*say in hints\(\).tensor sequence .* or replicate",
    ),
    (
        "positions that do not divide",
        Tokens,
        "cp=3",
        3,
        (),
        LayoutError,
        r"32 positions of entry 'tokens': 30 or 33 do",
    ),
    ("fewer samples than ranks", Tokens, "ddp", 16, (), LayoutError, r"set train.global_batch=16 or more"),
    (
        "experts where there are none",
        Tokens,
        "dp_replicate=4,ep=2",
        4,
        (),
        LayoutError,
        r"model\(\) has none.*leave ep out",
    ),
    (
        "several modules without a step",
        Several,
        "ddp",
        2,
        (),
        TaskError,
        r"model\(\) returned several modules \(one, two\): Several needs a step\(models, batch\)",
    ),
    (
        "a step whose sequences are cut",
        Stepping,
        "cp=2",
        2,
        (),
        LayoutError,
        r"cuts the batch of one forward and one loss, and Stepping has a step\(\) of its own: leave cp out",
    ),
    (
        "a step in a pipeline",
        Stepping,
        "pp=2",
        2,
        (),
        TaskError,
        r"Stepping has a step\(\) of its own, and pp=2 orders forwards and backwards itself: write loss",
    ),
    (
        "coupled samples whose positions are cut",
        Coupled,
        "cp=2,dp_shard=2",
        4,
        (),
        LayoutError,
        r"the loss of Coupled couples samples, and cp=2 gives each rank other positions.*leave cp out",
    ),
    (
        "nothing to compile",
        Layered,
        "ddp,compile=block",
        2,
        (),
        LayoutError,
        r"compile=block changes the model block by block, and no part of it repeats: name its parts in hints",
    ),
]


@pytest.mark.parametrize(
    ("kind", "layout", "world", "words", "error", "message"), [case[1:] for case in BROKEN], ids=[c[0] for c in BROKEN]
)
def test_a_broken_layout_or_task_is_caught(
    kind: type[Any], layout: str, world: int, words: tuple[str, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rehearsed(kind(), layout, world, *words)


def test_a_parameter_that_stays_whole_is_found() -> None:
    found = [one for one in rehearsed(Whole(hidden=256), "tp=2", 2).findings if one.kind == "unsharded"]
    assert len(found) == 3 * 3
    assert found[0].what == "layers.0.feed_forward.gate.weight ([1024, 256]) lies whole on each of tp=2 ranks"
    assert "hints().tensor" in found[0].next
    assert rehearsed(Tokens(hidden=256), "tp=2", 2).findings == ()


@pytest.mark.full
def test_a_parameter_that_tp_forgot_is_found_where_dp_shard_cuts_it() -> None:
    found = rehearsed(Whole(layers=1, hidden=256), "tp=2,dp_shard=2", 4).findings
    assert [one.kind for one in found] == ["unsharded"] * 3
    assert found[0].what == (
        "layers.0.feed_forward.gate.weight ([1024, 256]) is cut over dp_shard alone: each of tp=2 ranks gathers it "
        "whole, and uses all of it"
    )
    assert "hints().tensor" in found[0].next
    assert rehearsed(Tokens(layers=1, hidden=256), "tp=2,dp_shard=2", 4).findings == ()


def test_a_parameter_that_fsdp_cannot_cut_is_found() -> None:
    (found,) = rehearsed(Rowed(), "fsdp", 4).findings
    assert found.what == (
        "1.row ([1, 8192, 32]) lies whole on this rank: dp_shard=4 ranks share its first dim, which is 1"
    )
    assert rehearsed(Rowed(rows=8192), "fsdp", 4).findings == ()


def test_hints_that_match_nothing_are_found_where_the_layout_does_not_use_them() -> None:
    found = rehearsed(Misled(), "ddp", 2).findings
    assert [str(one).partition("; the ")[0] for one in found] == [
        "hints().tensor: 'layers.*.up' matches no module",
        "hints().split_before: 'blocks.3' matches no module",
        "hints().sequence_dims names 'z', which no tensor of the batch has",
    ]
    assert "nearest are" in found[1].what and found[1].next == "mend it: a layout with pp is refused by it"
    assert {one.kind for one in found} == {"hint"} and not any(one.fails for one in found)
    assert rehearsed(Led(), "ddp", 2).findings == ()


class Neglecting(Adversaries):
    """Its last loss is the critic's; and nobody's reaches the generator's last bias."""

    def step(self, models: Any, batch: Any) -> Any:
        """Two losses."""
        generator, critic = models["generator"], models["critic"]
        drawn = nn.functional.linear(generator[:-1](batch[:, :16]), generator[-1].weight)
        yield "generator", critic(drawn).sum(), len(batch)
        yield "critic", critic(batch).sum(), len(batch)


@pytest.mark.full
def test_parameters_that_no_loss_of_several_reaches_are_found() -> None:
    """What another turn's loss has updated is not among them."""
    for layout in ("single", "ddp"):
        (found,) = rehearsed(Neglecting(), layout, 1 if layout == "single" else 2).findings
        assert found.what == "generator.2.bias get no gradient"
    assert rehearsed(Adversaries(), "fsdp", 2).findings == ()


def test_parameters_that_the_loss_does_not_reach_are_found() -> None:
    (found,) = rehearsed(Idle(), "ddp", 2).findings
    assert found.what == "idle.weight and 1 more get no gradient"


def test_ranks_that_are_asked_for() -> None:
    _, layout = configured(Tokens(layers=8), "pp=4,dp_shard=2", 8, "train.global_batch=16")
    assert choose_ranks("kinds", layout) == (0, 1, 4, 5, 6, 7), "with two ranks a stage the last one is the neighbour"
    assert choose_ranks("7, 0", layout) == (7, 0)
    assert choose_ranks("all", layout) == tuple(range(8))
    for wrong, message in (("8", "8 processes, whose ranks are 0 to 7"), ("one", "'one' is no rank")):
        with pytest.raises(ConfigError, match=message):
            choose_ranks(wrong, layout)
