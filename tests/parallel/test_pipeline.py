"""The user's forward, run stage by stage: here by hand in one process, which is each rank in turn."""

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.mesh import Mesh
from allranks.parallel.pipeline import Pipeline
from allranks.parallel.stage_plan import plan_stages

WIDTH = 12


class OneOf(Mesh):
    """A mesh in which this process stands anywhere along pp."""

    def coordinate(self, axis: str) -> int:
        return self.rank if axis == "pp" else 0


class Model(nn.Module):
    """Four blocks between an embedding and a head, with a mask that every stage makes by itself."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.seen += 1
        hidden = self.embedding(x) * scale
        for block in self.blocks:
            hidden = block(hidden, mask=x > 3)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden)) * mask.unsqueeze(-1)


def made(kind: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def ranks(schedule: str = "1f1b", pp: int = 2, kind: type[nn.Module] = Model, **hints: Any) -> list[Pipeline]:
    """One pipeline for each rank, over copies of one model. Shapes between the stages are shared, as headers share."""
    layout = Layout(pp=pp, schedule=schedule)
    found = []
    for rank in range(pp):
        model = made(kind)
        found.append(Pipeline(model, plan_stages(model, layout.stage_ranks, **hints), OneOf(layout, rank, None)))
    for pipeline in found[1:]:
        pipeline.crossings = found[0].crossings
    return found


def through(pipelines: list[Pipeline], *arguments: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The output, and (received, sent) of each stage."""
    received, passed = (), []
    output: Any = None
    for stage in range(pipelines[0].last + 1):
        pipeline = next(one for one in pipelines if stage in one.stages)
        output = pipeline.run(stage, arguments, received)
        passed.append((received, output))
        if stage < pipeline.last:
            received = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
    return output, passed


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_the_stages_in_turn_are_the_model(schedule: str) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    model = made()
    expected = model(tokens, 0.5)
    expected.sum().backward()
    pipelines = ranks(schedule)
    output, passed = through(pipelines, tokens, 0.5)
    assert torch.equal(output, expected)
    gradients: Any = None
    for stage in reversed(range(len(passed))):
        received, sent = passed[stage]
        if gradients is None:
            sent.sum().backward()
        else:
            torch.autograd.backward(sent, gradients)
        gradients = [t.grad for t in received]
    named = [dict(pipeline.module.named_parameters(remove_duplicate=False)) for pipeline in pipelines]
    for name, parameter in model.named_parameters():
        found = sum(p.grad for p in {id(n[name]): n[name] for n in named}.values() if p.grad is not None)
        assert isinstance(found, torch.Tensor) and parameter.grad is not None, name
        assert torch.allclose(found, parameter.grad, atol=1e-7), name


def test_what_each_rank_holds() -> None:
    first, last = ranks()
    assert (first.stages, last.stages) == ((0,), (1,))
    named = dict(last.module.named_parameters(remove_duplicate=False))
    assert last.is_absent(named["blocks.0.linear.weight"]) and not last.is_absent(named["blocks.2.linear.weight"])
    # Tied: the first stage looks it up, the last one multiplies with it.
    assert not last.is_absent(named["embedding.weight"]) and "embedding.weight" not in last.ranks
    assert last.ranks["norm.weight"] == {1} and first.ranks["blocks.1.linear.bias"] == {0}
    assert "seen" not in first.ranks
    assert first.runs("blocks.1") and not first.runs("blocks.2") and last.runs("head")


def test_a_stage_names_its_own_parameters() -> None:
    last = ranks()[1]
    own = {id(p) for p in last.parameters(1)}
    named = dict(last.module.named_parameters(remove_duplicate=False))
    assert {name for name, p in named.items() if id(p) in own} == {
        "embedding.weight",
        "head.weight",
        "norm.weight",
        "norm.bias",
        *(f"blocks.{i}.linear.{leaf}" for i in (2, 3) for leaf in ("weight", "bias")),
    }


def test_what_travels_is_what_parameters_have_touched() -> None:
    pipelines = ranks()
    _, passed = through(pipelines, torch.arange(8).reshape(2, 4))
    (sent,) = passed[0][1]
    assert sent.shape == (2, 4, WIDTH) and sent.requires_grad
    assert len(pipelines[0].crossings[1]) == 1  # not the mask


def test_modules_of_other_stages_are_not_computed() -> None:
    first, last = ranks()
    with torch.no_grad():
        last.module.get_parameter("blocks.0.linear.weight").fill_(float("nan"))
        first.module.get_parameter("blocks.3.linear.weight").fill_(float("nan"))
    output, _ = through([first, last], torch.arange(8).reshape(2, 4))
    assert torch.isfinite(output).all()


def test_two_stages_of_one_rank_count_a_forward_once() -> None:
    pipelines = ranks("interleaved")
    through(pipelines, torch.arange(8).reshape(2, 4))
    assert [float(pipeline.module.get_buffer("seen")) for pipeline in pipelines] == [1.0, 1.0]


def test_outside_of_a_stage_modules_are_themselves() -> None:
    first, _ = ranks()
    tokens = torch.arange(4)
    assert torch.equal(first.module.get_submodule("embedding")(tokens), made().get_submodule("embedding")(tokens))


class ToAll(nn.Module):
    """Every block gets what one layer has made of the words, and a mask of their values: frozen or not."""

    def __init__(self, *, learns: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Embedding(9, WIDTH).requires_grad_(learns)
        self.embedding = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Reads() for _ in range(6))
        self.head = nn.Linear(WIDTH, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.encoder.weight.requires_grad):
            memory = self.encoder(x)
        near = memory[..., :1] > -0.5
        hidden, ranks = self.embedding(x), memory.argmax(-1)
        for block in self.blocks:
            hidden = block(hidden, near, memory=memory, ranks=ranks)
        found: torch.Tensor = self.head(hidden)
        return found


class Reads(Block):
    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, **beside: torch.Tensor) -> torch.Tensor:
        given = hidden + beside["memory"] * beside["ranks"].unsqueeze(-1)
        return hidden + torch.tanh(self.linear(given)) * mask


class LearnsToo(ToAll):
    def __init__(self) -> None:
        super().__init__(learns=True)


@pytest.mark.parametrize("kind", [ToAll, LearnsToo])
@pytest.mark.parametrize("pp", [2, 3])
def test_what_frozen_modules_have_made_reaches_every_block_of_every_stage(kind: Any, pp: int) -> None:
    tokens, model = torch.arange(8).reshape(2, 4), made(kind)
    expected = model(tokens)
    expected.sum().backward()
    pipelines = ranks(pp=pp, kind=kind)
    output, passed = through(pipelines, tokens)
    assert torch.equal(output, expected)
    sent = {(t.dtype, t.requires_grad) for t in passed[0][1]}
    assert sent == {
        (torch.float32, True),
        (torch.float32, kind is LearnsToo),
        (torch.bool, False),
        (torch.int64, False),
    }
    output.sum().backward()
    for received, before in zip([one[0] for one in passed[:0:-1]], [one[1] for one in passed[-2::-1]], strict=True):
        pairs = [(t, r.grad) for t, r in zip(before, received, strict=True) if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [gradient for _, gradient in pairs])
    named = [dict(pipeline.module.named_parameters()) for pipeline in pipelines]
    for name, parameter in model.named_parameters():
        found = next((n[name].grad for n in named if n[name].grad is not None), None)
        torch.testing.assert_close(found, parameter.grad, atol=1e-6, rtol=0, msg=name)
    assert not any(pipeline.wrong for pipeline in pipelines)


class Around(ToAll):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = first = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden, (x > 2).unsqueeze(-1), memory=first, ranks=x) + first.detach()
        found: torch.Tensor = self.head(hidden)
        return found


class Asks(ToAll):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 2 if self.encoder(x).abs().max() > 1 else 1
        return super().forward(x) * scale


class Skips(ToAll):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = [self.embedding(x)]
        for block in self.blocks:
            past.append(block(past[-1], (x > 2).unsqueeze(-1), memory=past[max(0, len(past) - 3)], ranks=x))
        found: torch.Tensor = self.head(past[-1])
        return found


class Leaves(Block):
    """Leaves a loss and a cache on itself."""

    aux_loss: Any = 0.0

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor, **_: Any) -> torch.Tensor:
        self.cache = mask if mask.any() else hidden
        self.aux_loss = hidden.square().mean() if self.training else 0.0
        return super().forward(hidden, mask)


class Left(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(4))


class Sums(Left):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        blocks: Any = self.blocks
        return super().forward(x, scale) + torch.stack([torch.as_tensor(block.aux_loss) for block in blocks]).sum()


LEAVES = r"blocks\.0 sets aux_loss in its forward, which test_pipeline.py:\d+ reads on another stage"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Sums, LEAVES),
        (Around, r"test_pipeline.py:\d+ uses a tensor of an earlier stage beside the blocks \("),
        (Asks, r"test_pipeline.py:\d+ reads the value of a tensor that another stage computes \(__bool__\)"),
        (Skips, r"blocks\.\d is called with a tensor of an earlier stage that is no argument where this one begins"),
    ],
)
def test_a_use_of_what_only_another_stage_has_is_seen(kind: Any, words: str) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    first, last = ranks(kind=kind)
    output, _ = through([first, last], tokens)
    assert not torch.equal(output, made(kind)(tokens))
    assert not first.wrong
    assert re.match(words, last.wrong), last.wrong


class Functional(Model):
    """Its head is a product with the embedding's weight, and no module."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = self.embedding(x) * scale
        for block in self.blocks:
            hidden = block(hidden, mask=x > 3)
        return nn.functional.linear(self.norm(hidden), self.embedding.weight)


def test_a_weight_of_another_stage_is_refused_outside_of_its_module() -> None:
    first, last = ranks(kind=Functional)
    last.module.get_submodule("embedding").to("meta")
    with pytest.raises(LayoutError, match=r"test_pipeline.py:\d+ uses embedding.weight outside of its module \(linear"):
        through([first, last], torch.arange(8).reshape(2, 4))


def test_what_a_block_leaves_on_itself_is_its_own_until_the_loss_reads_it() -> None:
    tokens = torch.arange(8).reshape(2, 4)
    first, last = ranks(kind=Left)
    output, _ = through([first, last], tokens)
    assert torch.equal(output, made(Left)(tokens)) and not first.wrong and not last.wrong
    blocks: Any = last.module.get_submodule("blocks")
    assert blocks[3].aux_loss > 0 and not last.wrong
    assert blocks[0].aux_loss == 0.0
    assert re.match(LEAVES, last.wrong), last.wrong
    through([first, last], tokens)
    assert type(blocks[0]) is Leaves


def test_a_stage_is_followed_once() -> None:
    pipelines = ranks(kind=ToAll)
    tokens = torch.arange(8).reshape(2, 4)
    first, _ = through(pipelines, tokens)
    with patch("allranks.parallel.pipeline.Dependence", side_effect=AssertionError):
        again, _ = through(pipelines, tokens)
        with torch.no_grad():
            alone, _ = through(pipelines, tokens)
    assert torch.equal(first, again) and torch.equal(first, alone)


class HeadFirst(Model):
    """Registers its head before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks, norm = self.blocks, self.norm
        del self.blocks, self.norm
        self.norm, self.blocks = norm, blocks


def test_a_module_out_of_order_is_refused_by_name() -> None:
    with pytest.raises(
        LayoutError, match="norm is called in stage 1 of the pipeline and registered among the modules of stage 0"
    ):
        through(ranks(kind=HeadFirst), torch.arange(4))


class Early(Model):
    """Leaves before its last blocks, without anybody's noticing."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = self.blocks[0](self.embedding(x), mask=x > 3)
        return found


def test_a_forward_that_never_comes_there_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"ended and had not called blocks\.2, where a stage of the pipeline begins"):
        through(ranks(kind=Early), torch.arange(4))


class OfWords(Model):
    """Its blocks take no floating tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Embedding(9, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return [self.embedding(x), *(block(x) for block in self.blocks)]


def test_a_block_without_activations_begins_no_stage() -> None:
    with pytest.raises(LayoutError, match=r"blocks\.1 is called without a floating tensor"):
        through(ranks(kind=OfWords), torch.arange(4))


class Looks(nn.Module):
    """What it returns depends on the values it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight if bool(mask.all()) else hidden[:1]


class Looking(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looks() for _ in range(4))


def test_a_block_that_looks_at_values_is_taken_to_return_what_it_is_given() -> None:
    tokens = torch.arange(4, 8)
    output, _ = through(ranks(kind=Looking), tokens)
    assert torch.equal(output, made(Looking)(tokens))


class Chosen(nn.Module):
    """An embedding of those tokens that are large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(9, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x[x >= 0])
        return found


class Choosing(Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Chosen()  # type: ignore[assignment]


def test_a_module_whose_shape_depends_on_values_cannot_be_passed_over() -> None:
    with pytest.raises(
        LayoutError, match=r"embedding belongs to another stage of the pipeline, and what it returns is not known"
    ):
        through(ranks(kind=Choosing), torch.arange(4, 8))


class Catching(Model):
    """Its forward catches whatever a block raises."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        try:
            return super().forward(x, scale)
        except Exception:
            return torch.zeros(0)


def test_user_code_does_not_catch_the_end_of_a_stage() -> None:
    output, _ = through(ranks(kind=Catching), torch.arange(4))
    assert torch.equal(output, made(Catching)(torch.arange(4)))


class Checkpointing(Model):
    """Its blocks are computed again in the backward, by the model's own code."""

    reentrant = False

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = self.embedding(x) * scale
        for block in self.blocks:
            hidden = checkpoint(block, hidden, x > 3, use_reentrant=self.reentrant)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


class Reentrant(Checkpointing):
    reentrant = True


class BySegments(Checkpointing):
    """One segment holds a block of either stage, and what the forward does between them."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        def middle(hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.blocks[1](hidden, mask=x > 3) * scale
            found: torch.Tensor = self.blocks[2](hidden, mask=x > 3)
            return found

        hidden = self.blocks[0](self.embedding(x) * scale, mask=x > 3)
        hidden = self.blocks[3](checkpoint(middle, hidden, use_reentrant=False), mask=x > 3)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


class ToAllAgain(LearnsToo):
    """Later blocks get zeros for what came with the first one, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        near, hidden, ranks = memory[..., :1] > 0, self.embedding(x), memory.argmax(-1)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, near, memory=memory, ranks=ranks, use_reentrant=False)
        found: torch.Tensor = self.head(hidden)
        return found


def gradients_through(pipelines: list[Pipeline], *arguments: Any) -> dict[str, torch.Tensor]:
    """Of every parameter, summed over the ranks, after forward and backward of all stages."""
    _, passed = through(pipelines, *arguments)
    gradients: Any = None
    for received, sent in reversed(passed):
        if gradients is None:
            sent.sum().backward()
        else:
            pairs = [(t, g) for t, g in zip(sent, gradients, strict=True) if t.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        gradients = [t.grad for t in received]
    named = [dict(pipeline.module.named_parameters(remove_duplicate=False)) for pipeline in pipelines]
    return {
        name: torch.stack([n[name].grad for n in named if n[name].grad is not None]).sum(0)  # type: ignore[misc]
        for name in named[0]
    }


@pytest.mark.parametrize("kind", [Checkpointing, BySegments, ToAllAgain])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_the_model_checkpoints_is_computed_again_with_what_was_received(
    kind: type[nn.Module], schedule: str
) -> None:
    tokens = torch.arange(8).reshape(2, 4)
    model = made(kind)
    model(tokens).sum().backward()
    found = gradients_through(ranks(schedule, kind=kind), tokens)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_around_the_begin_of_a_stage_is_refused() -> None:
    tokens = torch.arange(8).reshape(2, 4)
    with pytest.raises(LayoutError, match=r"blocks\.2 is checkpointed .*use_reentrant=True, .*say use_reentrant=False"):
        through(ranks(kind=Reentrant), tokens)
    with torch.no_grad():
        first, last = ranks(kind=Reentrant)
        for pipeline in (first, last):
            pipeline.crossings = {1: (0,)}
        output, _ = through([first, last], tokens)  # nothing is learnt here
    assert torch.equal(output, made(Reentrant)(tokens))


class Again(torch.autograd.Function):
    """A checkpoint that somebody has written: its second run has no context."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, hidden: torch.Tensor, mask: torch.Tensor) -> Any:
        ctx.block = block
        ctx.save_for_backward(hidden, mask)
        with torch.no_grad():
            return block(hidden, mask)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        hidden, mask = ctx.saved_tensors
        with torch.enable_grad():
            output = ctx.block(hidden.detach().requires_grad_(), mask)
        torch.autograd.backward(output, *gradient)


class Foreign(Model):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = self.embedding(x) * scale
        hidden = Again.apply(self.blocks[0], hidden, x > 3)  # type: ignore[no-untyped-call]
        for block in self.blocks[1:]:
            hidden = block(hidden, mask=x > 3)
        found: torch.Tensor = self.head(self.norm(hidden))
        return found


def test_what_other_code_computes_again_is_refused() -> None:
    first, _ = ranks(kind=Foreign)
    (sent,) = first.run(0, (torch.arange(8).reshape(2, 4),), ())
    with pytest.raises(LayoutError, match=r"blocks\.0 is computed again .* by other code than torch"):
        sent.sum().backward()
