"""A loss that looks at several positions is refused where sequences are cut, however large the model is."""

import importlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.distributed.pool import Pools
from tests.distributed.tasks import IGNORED
from tests.distributed.test_context_laws import RING, SEQ, Sentence
from tests.distributed.test_context_refusals import Shifting, start

pytestmark = pytest.mark.distributed

sequence_loss: Any = importlib.import_module("allranks.stepping.sequence_loss")
whole_check: Any = importlib.import_module("allranks.stepping.whole_check")

SUM = "the loss of a sequence is the sum over its 2 parts, because both are "
LAYOUTS = [
    ("cp=2", ()),
    ("cp=2", (RING,)),
    ("dp_shard=2,cp=2", (RING,)),
    ("tp=2,cp=2", ()),
    *(
        pytest.param(layout, overrides, marks=pytest.mark.full)
        for layout, overrides in [("dp_replicate=2,cp=2", ()), ("cp=2,pp=2", ()), ("cp=2,pp=2", (RING,))]
    ),
]


def started(task: Any, layout: str, *overrides: str, precision: str = "float32", **bounds: Any) -> Any:
    """In a worker: as `start`, where no model is small enough to be compared whole."""
    bounds = {"MOST_POSITIONS": sequence_loss.MOST_POSITIONS} | bounds
    with patch.multiple(sequence_loss, **bounds), patch.object(whole_check, "LARGEST_FLOPS", 0.0):
        return start(task, layout, "train.global_batch=8", *overrides, precision=precision)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("layout", "overrides"), LAYOUTS)
def test_a_shift_is_refused_and_a_sum_over_positions_passes(
    pool: Pools, layout: str, overrides: tuple[str, ...]
) -> None:
    size = 4 if "," in layout else 2
    refused = pool(size).run(started, Shifting(), layout, *overrides)
    assert len(set(refused)) == 1
    assert refused[0].startswith(f"LayoutError: layout {layout}") and "\n" not in refused[0]
    assert " does not compute what one process computes: the loss is " in refused[0]
    assert "2 parts of each sequence, and " in refused[0]
    assert "shift labels in the dataset, not in loss()" in refused[0]
    for said in pool(size).run(started, Sentence(), layout, *overrides):
        assert sum(line.startswith(SUM) and line.endswith("for 5 samples") for line in said) == 1, said
        assert any(line.startswith("the cut model was not compared with the whole one") for line in said)


@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_the_bounds_suit_the_precision(pool: Pools, precision: str) -> None:
    def run(task: Any) -> Any:
        return started(task, "cp=2", precision=precision)

    assert "shift labels" in pool(2).run(run, Shifting())[0]
    assert any(line.startswith(SUM) for line in pool(2).run(run, Sentence())[0])


@pytest.mark.parametrize("bounds", [{"MOST_POSITIONS": 8}, {"MOST_BYTES": 8 * 5 * 11 * 4}], ids=str)
@pytest.mark.parametrize("overrides", [(), (RING,)], ids=["ulysses", "ring"])
def test_what_is_joined_is_bounded_and_that_is_said(
    pool: Pools, bounds: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    def run(task: Any) -> Any:
        return started(task, "cp=2", *overrides, **bounds)

    assert "shift labels" in pool(2).run(run, Shifting())[0]
    (line,) = (line for line in pool(2).run(run, Sentence())[0] if line.startswith(SUM))
    assert line.endswith("for 8 of 12 positions of 5 samples")


class Drawing(Sentence):
    """Its loss draws random numbers."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().loss(output * torch.empty(()).uniform_(0.5, 1.5), batch)


class Beside(nn.Module):
    """Returns a penalty beside its scores, and scores that the loss changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sentence().model()

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        scores = self.inner(x, positions)
        return {"scores": scores, "penalty": (scores * 1).square().sum()}


class Penalised(Sentence):
    """Adds what the model returns beside its scores."""

    shifts: bool = False

    def model(self) -> nn.Module:
        return Beside()

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        output["scores"] /= 2
        found = Shifting().loss(output["scores"], batch) if self.shifts else super().loss(output["scores"], batch)
        return found + 0.01 * torch.as_tensor(output["penalty"])


class Zero(Sentence):
    """No position has a target."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        ignored = torch.full_like(batch["y"], IGNORED).flatten()
        return functional.cross_entropy(output.flatten(0, -2), ignored, reduction="sum")


class Long(Sentence):
    """Fails for a sequence that is whole."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        assert output.shape[1] < SEQ
        return super().loss(output, batch)


def test_what_is_no_shift_is_not_taken_for_one(pool: Pools) -> None:
    def run() -> list[Any]:
        return [started(task, "cp=2") for task in (Drawing(), Penalised(), Penalised(shifts=True), Zero(), Long())]

    drawing, penalised, shifting, zero, long = pool(2).run(run)[0]
    assert any(line.startswith(SUM) for line in penalised), penalised
    assert "shift labels" in shifting
    unknown = "whether the loss of a sequence is the sum over its parts is not known, because "
    assert f"{unknown}it is 0 for 5 samples" in zero
    joined = f"{unknown}loss() fails, is not finite or draws random numbers, for outputs that are joined"
    assert joined in long and joined in drawing
