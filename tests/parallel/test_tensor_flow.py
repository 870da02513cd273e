"""What passes between cut layers: gathered once, the same way in a recomputed block, and whole at the end."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.hints import TensorStyle
from allranks.layout import Layout
from allranks.models.transformer import Transformer
from allranks.parallel import tensor_ops
from tests.distributed.pool import Pools
from tests.parallel.spreads import spread

pytestmark = pytest.mark.distributed

TOKENS = torch.arange(10).view(2, 5)


class Dropping(nn.Module):
    """A block with dropout where tensors are cut, and where they are whole or cut along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.dropout(self.up(self.norm(x)), 0.5)
        return x + functional.dropout(self.down(inner), 0.5)


def recomputed(tensor: Mapping[str, TensorStyle], recompute: str) -> list[torch.Tensor]:
    """In a worker: the gradients of two blocks behind an embedding."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Sequential(Dropping(), Dropping()), nn.Linear(6, 11))
    cut = spread(lambda: layers, Layout(tp=2, recompute=recompute), "float64", tensor=tensor)
    torch.manual_seed(3)
    cut.modules[""](TOKENS).square().sum().backward()
    return [parameter.grad for parameter in cut.trainable().values() if parameter.grad is not None]


@pytest.mark.parametrize("norm", ["sequence", "replicate"])
def test_a_recomputed_block_goes_the_same_way(pool: Pools, norm: TensorStyle) -> None:
    """It begins in the middle of a forward: what is cut there, and which numbers are drawn, must be as it was."""
    tensor: dict[str, TensorStyle] = {"0": "vocab", "1.*.up": "colwise", "1.*.down": "rowwise", "2": "vocab"}
    tensor["1.*.norm"] = norm
    kept = pool(2).run(recomputed, tensor, "none")
    for mode in ("full", "selective"):
        for found, expected in zip(pool(2).run(recomputed, tensor, mode), kept, strict=True):
            assert len(found) == len(expected) == 15
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def tensors() -> list[torch.Tensor]:
    """All that there are."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def left_by(tensor: Mapping[str, TensorStyle], recompute: str) -> list[tuple[int, ...]]:
    """In a worker: the shapes of what a forward and its backward have left behind, gradients apart.

    A thread of gloo holds what it has moved until it is scheduled once more after the move has ended.
    """
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Sequential(Dropping(), Dropping()), nn.Linear(6, 11))
    cut = spread(lambda: layers, Layout(tp=2, recompute=recompute), "float64", tensor=tensor)
    before = tensors()
    known = {id(each) for each in before}
    cut.modules[""](TOKENS).square().sum().backward()
    for parameter in cut.trainable().values():
        parameter.grad = None
    within = time.monotonic() + 10
    while True:
        left = [tuple(each.shape) for each in tensors() if id(each) not in known]
        if not left or time.monotonic() > within:
            return left
        time.sleep(0.01)


@pytest.mark.parametrize("norm", ["sequence", "replicate"])
def test_a_recomputed_block_leaves_nothing_behind(pool: Pools, norm: TensorStyle) -> None:
    """Its second forward ends in the middle of the last product, and with it what its layers share has to end."""
    tensor: dict[str, TensorStyle] = {"0": "vocab", "1.*.up": "colwise", "1.*.down": "rowwise", "2": "vocab"}
    tensor["1.*.norm"] = norm
    for mode in ("none", "full", "selective"):
        assert pool(2).run(left_by, tensor, mode) == [[], []]


def noting(called: list[str], name: str, move: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        called.append(name)
        return move(*arguments)

    return call


def count_collectives() -> int:
    """In a worker: the collectives of a forward and its backward."""
    cut = spread(lambda: Transformer(11, 1, 16, 4, tied=False), Layout(tp=2))
    called: list[str] = []
    moves = {name: getattr(tensor_ops, name) for name in ("_sum", "_all_gather", "_reduce_scatter")}
    for name, move in moves.items():
        setattr(tensor_ops, name, noting(called, name, move))
    try:
        cut.modules[""](TOKENS).sum().backward()
    finally:
        for name, move in moves.items():
            setattr(tensor_ops, name, move)
    return len(called)


def test_query_key_and_value_share_one_gathering(pool: Pools) -> None:
    """Embedding 1 out, attention 1 in and 1 out, feed-forward 1 in and 1 out, output 1 in and 1 out: 7 each way, but
    the gathered logits' backward is a part at hand; and each of the 3 norms sums its weight's gradient."""
    assert pool(2).run(count_collectives) == [16, 16]


class TwoLengths(nn.Module):
    """Two sequences of unequal length in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(11, 6), nn.Embedding(11, 6)
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words, _ = self.words(x), self.memory(x[:, :2])
        found: torch.Tensor = self.up(self.norm(words))
        return found


def confuse() -> str:
    tensor: dict[str, TensorStyle] = {"words": "vocab", "memory": "vocab", "norm": "sequence", "up": "colwise"}
    cut = spread(TwoLengths, Layout(tp=2), tensor=tensor)
    try:
        cut.modules[""](TOKENS)
    except LayoutError as error:
        return str(error)
    return ""


def test_two_lengths_in_one_model_are_refused(pool: Pools) -> None:
    found = pool(2).run(confuse)
    assert found[0].startswith("a rank has 3 positions of a sequence of 2 cut over tp: two sequences of unequal length")


class Ends(nn.Module):
    """Returns its hidden states, or runs a layer on them, besides the output of its vocab layer."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(11, 6), nn.LayerNorm(6), nn.Linear(6, 11)
        self.value, self.which = nn.Linear(6, 1), which

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.words(x))
        if self.which == "none":
            return hidden
        logits = self.head(hidden)
        return (logits, self.value(hidden)) if self.which == "value" else (logits, hidden)


def end(which: str) -> str:
    tensor: dict[str, TensorStyle] = {"words": "vocab", "norm": "sequence", "head": "vocab", "value": "replicate"}
    cut = spread(lambda: Ends(which), Layout(tp=2), tensor=tensor)
    try:
        cut.modules[""](TOKENS)
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("hidden", "what Ends returns is cut along the sequence"),
        ("none", "what Ends returns is cut along the sequence"),
        ("value", "Linear runs after the model's vocab layer"),
    ],
)
def test_nothing_cut_leaves_the_model(pool: Pools, which: str, message: str) -> None:
    assert all(found.startswith(message) for found in pool(2).run(end, which))
