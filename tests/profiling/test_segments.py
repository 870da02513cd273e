"""Units of a model, in the order of its forward."""

from typing import Any

import torch
from torch import nn

from allranks.profiling.segments import INPUTS, LOSS, Segment, cut_into_segments
from tests.profiling.recordings import observe

WIDTH, ROWS = 4, 3
ROW_BYTES = ROWS * WIDTH * 4


class Net(nn.Module):
    """Two blocks with a sum between them, a layer before, one after, and one that nobody runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(WIDTH, 2)
        self.unread = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x * 2)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


def segments_of(make: Any, **known: Any) -> list[Segment]:
    structure, (seen,) = observe(make, (ROWS, WIDTH), **known)
    return cut_into_segments(seen.recording.calls, structure)


def test_units_are_blocks_and_what_stands_around_them() -> None:
    found = segments_of(Net, blocks=("blocks.0", "blocks.1"))
    units = [(segment.unit, segment.repeated) for segment in found]
    assert units == [
        (INPUTS, False),
        ("", False),
        ("first", False),
        ("blocks.0", True),
        ("blocks.1", True),
        ("last", False),
        (LOSS, False),
        ("unread", False),
    ]
    block = found[3]
    assert [(piece.name, piece.kind, piece.parameters) for piece in block.pieces] == [
        ("0", "matmul", ["blocks.0.0.bias", "blocks.0.0.weight"]),
        ("1", "elementwise", []),
        ("add", "elementwise", []),  # the residual between two blocks belongs to the first
    ]
    assert block.input_bytes == ROW_BYTES
    assert block.pieces[0].flops == 2 * ROWS * WIDTH * WIDTH
    assert sum(piece.saved_bytes for piece in block.pieces) == 2 * ROW_BYTES  # its input and the tanh's output
    assert found[-1].pieces[0].parameters == ["unread.weight", "unread.bias"]


def test_the_first_unit_reads_the_batch() -> None:
    found = segments_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)))
    by_name = {segment.unit: segment for segment in found}
    assert by_name["0"].input_bytes == ROW_BYTES
    assert [piece.input_gradient for piece in by_name["0"].pieces] == [False]
    assert [piece.input_gradient for piece in by_name["1"].pieces] == [True]


def test_parameters_count_where_they_are_read_first() -> None:
    def make() -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))

    found = segments_of(make, blocks=("0", "1"))
    named = [name for segment in found for piece in segment.pieces for name in piece.parameters]
    assert sorted(named) == ["0.0.bias", "0.0.weight", "1.0.bias", "1.0.weight"]
    assert len({segment.unit for segment in found if any(piece.parameters for piece in segment.pieces)}) == 1


def test_elementwise_kernels_of_a_norm_are_the_norm() -> None:
    found = segments_of(lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2)))
    (norm,) = [segment for segment in found if segment.unit == "0"]
    assert [(piece.kind, piece.place) for piece in norm.pieces] == [("norm", "0")]
