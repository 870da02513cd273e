"""What looks at other positions than attention shows is refused where no process can compute the whole model."""

import importlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from allranks.stepping.position_check import KEPT_BYTES, _compare, _halves
from tests.distributed.pool import Pools
from tests.distributed.test_context_laws import RING, SEQ, VOCABULARY, Encoder, Sentence
from tests.distributed.test_context_refusals import Other, start

pytestmark = pytest.mark.distributed

whole_check: Any = importlib.import_module("allranks.stepping.whole_check")
FOUND = "forward treats each position by itself, attention aside, because outputs of 2 samples follow their own "
CALL = "call torch.nn.functional.scaled_dot_product_attention by that name"
PLACE = "take the argument `positions` (or position_ids), which allranks fills, in place of torch.arange"


class Built(Sentence):
    """A model of MODELS."""

    kind: str = ""

    def model(self) -> nn.Module:
        return MODELS[self.kind]()


class Halfway(Encoder):
    """Its first layer attends over the whole sequence, its second one by hand."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        value = self.layers.layers[0](self.words(x))
        found: torch.Tensor = self.head((value @ value.mT / 5).softmax(-1) @ value)
        return found * self.scale


class Placed(nn.Module):
    """No attention; learned places, counted from the start of what it gets unless it knows better."""

    def __init__(self, takes: bool) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(11, 8), nn.Embedding(SEQ, 8), nn.Linear(8, VOCABULARY)
        self.takes = takes
        nn.init.zeros_(self.places.weight)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        places = positions if self.takes else torch.arange(x.shape[1])
        found: torch.Tensor = self.out(self.words(x) + self.places(places))
        return found


class Counted(nn.Module):
    """Padding that it makes by itself, from places counted from the start of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.words(x).unflatten(-1, (2, 4)).transpose(1, 2)
        seen = (torch.arange(x.shape[1]) < 4).expand(len(x), 1, 1, -1)
        found = nn.functional.scaled_dot_product_attention(value, value, value, attn_mask=seen)
        scores: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return scores


class Pooling(nn.Module):
    """Gives one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(x).mean(1, keepdim=True)
        return found


MODELS = {
    "encoder": lambda: Encoder(padded=True),
    "halfway": lambda: Halfway(padded=False),
    "places": lambda: Placed(takes=True),
    "own places": lambda: Placed(takes=False),
    "own padding": Counted,
}


def started(task: Any, layout: str, *overrides: str, precision: str = "float32") -> Any:
    """In a worker: as `start`, where no model is small enough to be compared whole."""
    with patch.object(whole_check, "LARGEST_FLOPS", -1.0):
        return start(task, layout, "train.global_batch=8", *overrides, precision=precision)


@pytest.mark.parametrize(
    ("layout", "overrides", "precision"),
    [
        ("cp=2", (), "float32"),
        ("cp=2", (RING,), "bfloat16"),
        ("dp_shard=2,cp=2", (RING,), "float64"),
        pytest.param("tp=2,cp=2", (), "float32", marks=pytest.mark.full),
        pytest.param("cp=2,pp=2", (), "float32", marks=pytest.mark.full),
        pytest.param("dp_replicate=2,cp=2", (), "bfloat16", marks=pytest.mark.full),
    ],
)
def test_attention_by_hand_and_places_of_its_own_are_refused(
    pool: Pools, layout: str, overrides: tuple[str, ...], precision: str
) -> None:
    def run() -> list[Any]:
        kinds = () if "pp" in layout else ("blind",) if "tp" in layout else ("blind", "plain", "convolved")
        tasks = [Sentence(), *(Other(kind=kind) for kind in kinds)]  # a pipeline needs blocks, tp layers to cut
        return [started(task, layout, *overrides, precision=precision) for task in tasks]

    for right, *wrong in pool(4 if "," in layout else 2).run(run):
        (line,) = (line for line in right if line.startswith(FOUND))
        assert "calls of attention were joined over the 2 parts" in line and "; 0 calls" not in line
        for blind in wrong[:1]:
            assert blind.startswith(f"LayoutError: layout {layout}") and PLACE in blind and "\n" not in blind
        for other in wrong[1:]:
            assert other.startswith(f"LayoutError: layout {layout}") and "\n" not in other
            assert "0 calls of attention" in other and "looks at other positions" in other and CALL in other


def test_what_is_right_beside_attention_passes_and_what_hides_behind_it_does_not(pool: Pools) -> None:
    def run() -> dict[str, Any]:
        return {kind: started(Built(kind=kind), "cp=2") for kind in MODELS}

    found = pool(2).run(run)[0]
    assert any(line.startswith(FOUND) and "2 calls" in line for line in found["encoder"]), found["encoder"]
    assert any(line.startswith(FOUND) and "0 calls" in line for line in found["places"]), found["places"]
    assert "1 calls of attention were joined" in found["halfway"] and CALL in found["halfway"]
    assert PLACE in found["own places"] and PLACE in found["own padding"]


class Noisy(nn.Module):
    """Draws random numbers in evaluation, too; `attends`: with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Encoder(padded=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        found: torch.Tensor = self.inner(x, positions)
        return found * torch.empty_like(found).uniform_(0.5, 1.5)


def test_what_cannot_be_judged_is_said_and_refused_where_nothing_was_joined(pool: Pools) -> None:
    def run() -> tuple[Any, Any]:
        with patch.dict(MODELS, {"noisy": Noisy, "pooling": Pooling}):
            return started(Built(kind="noisy"), "cp=2"), started(Broad(kind="pooling"), "cp=2")

    noisy, pooling = pool(2).run(run)[0]
    assert any("is not known, because its outputs are not finite, or draw random numbers; 2 calls" in n for n in noisy)
    assert "no call of attention was joined over their 2 parts" in pooling and CALL in pooling


class Broad(Built):
    """Every position of a part is scored alike."""

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return super().loss(output.expand(-1, batch["y"].shape[1], -1), batch)


def test_a_model_that_is_compared_whole_is_not_judged_in_this_way(pool: Pools) -> None:
    def run() -> Any:
        return start(Sentence(), "cp=2", "train.global_batch=8")

    assert not any(line.startswith(FOUND) for line in pool(2).run(run)[0])


def outputs(*rows: torch.Tensor) -> Any:
    return [(row[: len(row) // 2], row[len(row) // 2 :]) for row in rows]


def judged(change: Any, size: int = 200) -> tuple[float, float, bool, bool, bool]:
    """What is found where `change` was made to the last half of what the repeated part gives."""
    first = torch.randn(2 * size, 3, generator=torch.Generator().manual_seed(0))
    second = torch.cat([first[size:], first[size:]])
    change(second[size:])
    return _compare(1e-3, outputs(first), outputs(first.clone()), outputs(second))


def test_few_positions_here_and_there_are_a_routers_and_the_first_one_is_a_neighbours() -> None:
    def none(right: torch.Tensor) -> None:
        pass

    def scattered(right: torch.Tensor) -> None:
        right[[17, 90, 151]] += 1

    def first(right: torch.Tensor) -> None:
        right[:2] += 1

    def many(right: torch.Tensor) -> None:
        right[1::2] += 1

    def broken(right: torch.Tensor) -> None:
        right[3] = float("nan")

    assert judged(none) == (0.0, 0.0, True, False, False)
    assert judged(scattered) == (0.0, 0.0, True, False, True)
    for change in (first, many, broken):
        elsewhere, place, found, drawn, few = judged(change)
        assert elsewhere > 1 and (place, found, drawn, few) == (0.0, True, False, False)


def test_outputs_of_unlike_shapes_are_not_compared() -> None:
    one, other = outputs(torch.ones(4, 2)), outputs(torch.ones(6, 2))
    assert _compare(1e-3, one, other, one) == (0.0, 0.0, True, True, False)
    assert _compare(1e-3, [], [], []) == (0.0, 0.0, False, False, False)


def test_of_a_large_output_few_positions_are_kept() -> None:
    wide = torch.arange(8.0).view(1, 8, 1).expand(2, 8, KEPT_BYTES // 16)
    ((left, right),) = _halves({"logits": wide, "counts": torch.ones(8), "loss": torch.ones(())}, 1, 8)
    assert left.shape == right.shape == (2, 2 * (KEPT_BYTES // 16))
    assert (left[:, 0].tolist(), right[:, 0].tolist()) == ([0.0, 1.0], [4.0, 5.0])
