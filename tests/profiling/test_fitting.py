"""What one sample costs, from steps of two numbers of samples."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.model_profile import ModelProfile
from allranks.profiling.fitting import build_profile
from allranks.profiling.segments import cut_into_segments
from tests.profiling.recordings import observe

WIDTH = 4


def profile_of(make: Any, *shapes: tuple[int, ...], **known: Any) -> ModelProfile:
    structure, seen = observe(make, *shapes, **known)
    return build_profile(structure, seen, precision="float32", source="traced")


class Table(nn.Module):
    """Adds a table that it computes anew in each forward, whatever the number of samples."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("table", torch.ones(1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * (self.table * 2).exp()
        return found


def test_what_grows_with_the_samples_is_told_from_what_does_not() -> None:
    two = profile_of(Table, (2, WIDTH), (3, WIDTH))
    assert two.facts["saved_bytes"] == WIDTH * 4  # the layer's input; the product keeps nothing else of a sample
    assert two.facts["saved_constant_bytes"] == WIDTH * 4  # the table
    assert two.facts["buffer_bytes"] == WIDTH * 4
    assert two.flops == 2 * WIDTH * WIDTH
    (layer,) = [o for block in two.blocks for o in block.operations if o.kind == "matmul"]
    assert layer.shape == (1, WIDTH, WIDTH)
    assert (layer.parameters, layer.parameter_bytes) == (WIDTH * WIDTH, 4 * WIDTH * WIDTH)


def test_one_recording_is_divided() -> None:
    one = profile_of(Table, (2, WIDTH))
    assert one.facts["saved_bytes"] == (2 * WIDTH * 4 + WIDTH * 4) / 2
    assert one.facts["saved_constant_bytes"] == 0


class Branching(nn.Module):
    """Runs something else with three samples than with two."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return self.layer(found) if len(x) > 2 else found


def test_where_two_steps_differ_the_larger_counts() -> None:
    assert profile_of(Branching, (2, WIDTH), (3, WIDTH)).flops == 2 * 2 * WIDTH * WIDTH


def blocks_of(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, w), nn.Linear(w, WIDTH)) for w in widths))


def test_equal_blocks_in_a_row_are_one_with_a_count() -> None:
    names = tuple(str(index) for index in range(5))
    found = profile_of(lambda: blocks_of(6, 6, 8, 6, 6), (2, WIDTH), (3, WIDTH), blocks=names)
    # The first reads the batch, whose gradient nobody wants, and is another.
    shown = [(block.name, block.count) for block in found.blocks if block.repeated]
    assert shown == [("0", 1), ("1", 1), ("2", 1), ("*", 2)]
    assert found.num_repeated == 5
    assert found.parameters == 4 * (6 * WIDTH + 6 + 6 * WIDTH + WIDTH) + (8 * WIDTH + 8 + 8 * WIDTH + WIDTH)


def test_frozen_layers_are_not_trained() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 2))

    first, second = [o for b in profile_of(make, (2, WIDTH), (3, WIDTH)).blocks for o in b.operations if o.parameters]
    assert (first.trained, second.trained) == (False, True)


class Attending(nn.Module):
    """Attention over positions, with fewer key heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = x.unflatten(-1, (4, 2)).transpose(1, 2), x[..., :4].unflatten(-1, (2, 2)).transpose(1, 2)
        query = query * self.scale
        return functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_attention_tells_positions_and_heads() -> None:
    found = profile_of(Attending, (2, 6, 8), (3, 6, 8))
    assert (found.seq, found.heads, found.kv_heads, found.context_parallel) == (6, 4, 2, True)
    (attention,) = [o for b in found.blocks for o in b.operations if o.kind == "attention"]
    assert attention.shape == (6, 6, 4, 2, 2)
    assert attention.causal
    assert not profile_of(Attending, (2, 6, 8), coupled=True).context_parallel


@pytest.mark.parametrize("source", ["traced", "measured"])
def test_where_it_is_from(source: Any) -> None:
    structure, seen = observe(Table, (2, WIDTH), (3, WIDTH), tied=(("a", "b"),), stateful=("norm",))
    found = build_profile(structure, seen, precision="float32", source=source)
    assert (found.source, found.tied, found.stateful, found.precision) == (source, (("a", "b"),), ("norm",), "float32")
    assert len(found.digest) == 64


def test_a_squared_error_holds_its_input_its_target_and_their_difference_once() -> None:
    """Four bytes a number: the output, which nobody else keeps, the target of the batch, and what the step makes."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, torch.zeros_like(output), reduction="sum")

    profile = profile_of(lambda: nn.Linear(WIDTH, WIDTH), (2, WIDTH), (3, WIDTH), loss=loss)
    (found,) = [o for block in profile.blocks for o in block.operations if o.kind == "loss"]
    kept = 2 * WIDTH * 4  # output and target
    assert found.saved_bytes == kept
    assert kept < found.peak_bytes <= 2 * kept < 3 * kept


def test_a_loss_of_several_operations_holds_its_peak_once() -> None:
    """What a contrastive loss makes: each operation that keeps something has its share, so that no one is guessed."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        scores = functional.normalize(output, dim=1) @ torch.ones(WIDTH, 64)
        return functional.cross_entropy(scores, torch.zeros(len(output), dtype=torch.long), reduction="sum")

    structure, seen = observe(lambda: nn.Linear(WIDTH, WIDTH), (2, WIDTH), (3, WIDTH), loss=loss)
    profile = build_profile(structure, seen, precision="float32", source="traced")
    pieces = [o for block in profile.blocks for o in block.operations if o.kind == "loss"]
    assert len([one for one in pieces if one.saved_bytes]) > 1
    peaks = [_loss_peak(one.recording, structure) for one in seen]
    assert sum(one.peak_bytes for one in pieces) == pytest.approx(peaks[1] - peaks[0])
    assert all(one.peak_bytes > 0 for one in pieces if one.saved_bytes > 0)


def _loss_peak(recording: Any, structure: Any) -> float:
    (calls,) = (
        s.calls for s in cut_into_segments(recording.calls, structure) if any(p.kind == "loss" for p in s.pieces)
    )
    return float(recording.loss_bytes(calls))
