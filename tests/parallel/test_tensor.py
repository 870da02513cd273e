"""Layers that compute with parts: whole outputs, exact gradients, and what is drawn where."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.hints import TensorStyle
from allranks.layout import Layout
from allranks.models.transformer import Transformer
from allranks.parallel.spread import Spread
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

pytestmark = pytest.mark.distributed

Build = Callable[[], nn.Module]


def outcome(build: Build, tensor: Mapping[str, TensorStyle], *inputs: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """In a worker: the largest differences from the whole model, of the output and of the input's gradient; and the
    fraction of the whole model's parameters that this rank holds."""
    torch.manual_seed(0)
    whole = build().double()
    cut = spread(build, Layout(tp=2), "float64", tensor=tensor)
    found = []
    for module in (whole, cut.modules[""]):
        given = [value.clone().requires_grad_(value.is_floating_point()) for value in inputs]
        output = module(*given)
        (output * torch.arange(output.numel()).view_as(output).double().cos()).sum().backward()
        found.append((output.detach(), [value.grad for value in given if value.grad is not None]))
    (expected, expected_gradients), (output, gradients) = found
    held = sum(tensor.numel() for tensor in cut.trainable().values()) / sum(p.numel() for p in whole.parameters())
    pairs = zip(expected_gradients, gradients, strict=True)
    error = max((float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None), default=0.0)
    error = max(error, *gradient_errors(cut, whole))
    return (output - expected).abs().max(), torch.tensor(error), held


def gradient_errors(cut: Spread, whole: nn.Module) -> list[float]:
    """The largest difference of each parameter's gradient from this rank's part of the whole one's."""
    errors = []
    for name, parameter in whole.named_parameters():
        box, found = cut.map[name].box, cut.tensors[name].grad
        place = box.place(tuple(parameter.shape))
        if parameter.grad is not None:
            assert found is not None, name
            errors.append(float((found - parameter.grad[place]).abs().max()))
    return errors


class Normed(nn.Module):
    """A norm over the channels of each head, between the cut layers; biases; a scale after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(self.up(x).unflatten(-1, (-1, 4)))
        found: torch.Tensor = self.last(x + self.down(heads.flatten(-2)))
        return found


class Biased(nn.Module):
    """Biases everywhere, and a padding token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 6, padding_idx=3), nn.LayerNorm(6), nn.Linear(6, 11)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        hidden = hidden + self.down(torch.relu(self.up(self.norm(hidden))))
        found: torch.Tensor = self.head(hidden)
        return found


X = torch.linspace(-1, 1, 2 * 5 * 6, dtype=torch.float64).view(2, 5, 6)
BIASED: dict[str, TensorStyle] = {"words": "vocab", "up": "colwise", "down": "rowwise", "head": "vocab"}
TOKENS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(
    ("build", "tensor", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)), {}, (X,)),
        (Normed, {"up": "colwise", "down": "rowwise"}, (X,)),
        (Normed, {"up": "colwise", "norm": "part", "down": "rowwise", "last": "vocab"}, (X,)),
        (lambda: Transformer(11, 2, 16, 4), {}, (TOKENS,)),
        (Biased, BIASED, (TOKENS,)),
        (Biased, BIASED | {"norm": "sequence"}, (TOKENS,)),
        (
            lambda: Transformer(11, 2, 16, 4, tied=False),
            {
                "embedding": "replicate",
                "layers.*.*_norm": "sequence",
                "layers.*.attention": "replicate",
                "layers.*.feed_forward": "replicate",
                "norm": "sequence",
                "output": "vocab",
            },
            (TOKENS,),
        ),
    ],
    ids=["pair", "norm between", "part", "transformer", "biases", "biases on positions", "positions only"],
)
def test_outputs_and_gradients_are_those_of_the_whole(pool: Pools, build: Build, tensor: Any, inputs: Any) -> None:
    for output, gradient, _ in pool(2).run(outcome, build, tensor, *inputs):
        assert output < 1e-13 and gradient < 1e-13


def test_a_rank_holds_its_part_only(pool: Pools) -> None:
    held = [held for _, _, held in pool(2).run(outcome, lambda: Transformer(12, 2, 16, 4), {}, TOKENS)]
    assert all(0.5 < fraction < 0.55 for fraction in held)


def entries(build: Build, layout: Layout) -> list[tuple[str, Any, Any, Any, Any]]:
    found = spread(build, layout)
    return [(name, e.shape, e.box.offset, e.box.shape, e.holders) for name, e in found.map.items()]


def test_the_map_tells_which_part_it_is(pool: Pools) -> None:
    ranks = pool(4).run(
        entries, lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)), Layout(tp=2, dp_shard=2)
    )
    expected = {0: ((0, 0), (1, 6)), 1: ((2, 0), (1, 6)), 2: ((1, 0), (1, 6)), 3: ((3, 0), (1, 6))}
    for rank, found in enumerate(ranks):
        by_name = {name: rest for name, *rest in found}
        shape, offset, part, holders = by_name["0.weight"]
        assert (shape, offset, part, holders) == ((4, 6), *expected[rank], (rank,))
        assert by_name["2.weight"][1] == (rank // 2, 2 * (rank % 2))
        assert by_name["2.bias"][3] == ((0, 1) if rank < 2 else (2, 3))


def masks(inside: bool) -> torch.Tensor:
    """In a worker: what dropout leaves of ones, between the cut layers or after them."""
    dropout = nn.Dropout(0.5)
    ends: list[nn.Module] = [nn.Linear(64, 64), nn.Linear(64, 64)]
    layers = [ends[0], dropout, ends[1]] if inside else [*ends, dropout]
    cut = spread(lambda: nn.Sequential(*layers), Layout(tp=2), "float64")
    seen: list[torch.Tensor] = []
    dropout.register_forward_hook(lambda module, given, output: seen.append(output != 0))
    torch.manual_seed(5)
    cut.modules[""](torch.ones(2, 64, dtype=torch.float64))
    return seen[0]


def test_dropout_draws_apart_inside_and_alike_outside(pool: Pools) -> None:
    first, second = pool(2).run(masks, True)
    assert first.shape == (2, 32) and not torch.equal(first, second)
    first, second = pool(2).run(masks, False)
    assert first.shape == (2, 64) and torch.equal(first, second)


def second_derivatives() -> float:
    """In a worker: the largest difference of the gradients of a gradient penalty from the whole model's."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    whole, cut = copy_of(layers).double(), spread(lambda: copy_of(layers), Layout(tp=2), "float64")
    for module in (whole, cut.modules[""]):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        (slope.norm() - 1).square().backward()
    return max(gradient_errors(cut, whole))


def copy_of(module: nn.Module) -> nn.Module:
    return deepcopy(module)


def test_a_gradient_penalty_is_that_of_the_whole(pool: Pools) -> None:
    assert max(pool(2).run(second_derivatives)) < 1e-13


def modes_of_autograd() -> list[bool]:
    """In a worker: after a forward without gradients the next one has them, and inference works."""
    pair = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    cut = spread(lambda: nn.Sequential(nn.Linear(6, 6), pair), Layout(tp=2), "float64")
    first = cut.modules[""].get_submodule("0")
    hidden = first(X)
    with torch.no_grad():
        pair[0](hidden)
    pair(hidden).sum().backward()
    with torch.inference_mode():
        inferred = cut.modules[""](X)
    return [p.grad is not None for p in first.parameters()] + [bool(torch.isfinite(inferred).all())]


def test_gradients_inference_and_neither(pool: Pools) -> None:
    assert pool(2).run(modes_of_autograd)[0] == [True, True, True]


def look_up_a_stranger() -> list[str]:
    cut = spread(lambda: nn.Sequential(nn.Embedding(7, 4)), Layout(tp=2), tensor={"0": "vocab"})
    found = []
    for token in (-1, 7):
        try:
            cut.modules[""](torch.tensor([0, token]))
        except IndexError as error:
            found.append(str(error))
    return found


def test_a_token_that_is_in_no_part_is_refused(pool: Pools) -> None:
    assert pool(2).run(look_up_a_stranger)[0] == ["a token outside of 0 to 6"] * 2


def shares_unlike() -> str:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight = module[0].weight
        return module

    try:
        spread(build, Layout(tp=2))
    except LayoutError as error:
        return str(error)
    return ""


def test_a_shared_parameter_is_cut_in_one_way(pool: Pools) -> None:
    assert pool(2).run(shares_unlike) == ["0 and 1 share a parameter, and tp would cut it in two ways"] * 2
