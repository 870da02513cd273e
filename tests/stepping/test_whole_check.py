"""A cut model that computes something else than the whole one is found before the first step."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.errors import LayoutError
from allranks.task import Hints
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny

pytestmark = pytest.mark.distributed

whole_check: Any = importlib.import_module("allranks.stepping.whole_check")


class Heads(nn.Module):
    """Attention that splits its channels by a number of heads which it keeps: of a part it makes narrower heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.out = nn.Linear(5, 8), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1) * torch.linspace(1, 2, 4, dtype=x.dtype).view(1, 4, 1)
        query, key = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key))
        mixed = functional.scaled_dot_product_attention(query, key, key)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2)).mean(1)
        return found


class Halves(nn.Module):
    """Drops a scale inside: right outputs, but a gradient of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.gain * torch.tanh(self.up(x)))
        return found


class Wrong(Tiny):
    which: str = "heads"

    def model(self) -> nn.Module:
        return Heads(2) if self.which == "heads" else Halves()

    def hints(self) -> Hints:
        if self.which == "heads":
            return Hints(tensor={"query": "colwise", "key": "colwise", "out": "rowwise"})
        return Hints(tensor={"up": "colwise", "down": "rowwise"})


def start(task: Any, layout: str, precision: str) -> Any:
    """In a worker: the refusal, or what was decided."""
    try:
        return [str(decision) for decision in session_of(task, config_of(layout, precision=precision)).decisions]
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp_replicate=2", "tp=2,dp_shard=2"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_what_is_right_passes(pool: Pools, layout: str, precision: str) -> None:
    for kind in ("transformer", "scalars"):
        for found in pool(2 if layout == "tp=2" else 4).run(start, Tiny(kind=kind), layout, precision):
            assert any(said.startswith("the cut model computes what the whole one does") for said in found)


def test_under_bfloat16_the_bounds_are_wider(pool: Pools) -> None:
    found = pool(2).run(start, Tiny(kind="transformer"), "tp=2", "bfloat16")
    assert any("computes what the whole one does" in said for said in found[0])
    assert "does not compute" in pool(2).run(start, Wrong(which="gain"), "tp=2", "bfloat16")[0]


@pytest.mark.parametrize(("which", "name"), [("heads", "(query|key|out)"), ("gain", "gain")])
@pytest.mark.parametrize("layout", ["tp=2", "tp=2,dp_shard=2"])
def test_what_looks_at_whole_tensors_is_found(pool: Pools, which: str, name: str, layout: str) -> None:
    found = pool(2 if layout == "tp=2" else 4).run(start, Wrong(which=which), layout, "float32")
    assert len(set(found)) == 1
    with pytest.raises(LayoutError, match=rf"the gradient of {name}.* is .*, and .* for the whole model"):
        raise LayoutError(found[0])


def start_large() -> Any:
    whole_check.LARGEST_FLOPS = 0.0
    return start(Tiny(kind="transformer"), "tp=2", "float32")


def test_what_would_take_long_is_left_out_and_that_is_said(pool: Pools) -> None:
    found = pool(2).run(start_large)[0]
    assert any(said.startswith("the cut model was not compared with the whole one, because one") for said in found)
