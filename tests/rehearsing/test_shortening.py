"""Which blocks are left out, which stand for them, and when none can be."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from allranks.rehearsing.shortening import NotShortened, _Shape, equal_runs
from tests.rehearsing.tasks import Tokens, rehearsed


def test_runs_of_equal_blocks() -> None:
    wide = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*wide)
    names = ["0", "1", "2", "3", "4"]
    assert equal_runs(model, names) == [["0", "1"], ["2"], ["3"], ["4"]]
    assert equal_runs(model, names, begins={"1"}) == [["0"], ["1"], ["2"], ["3"], ["4"]]
    assert equal_runs(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.2)), ["0", "1"]) == [["0"], ["1"]]


def test_a_block_that_is_left_out_returns_what_it_is_given() -> None:
    shape, value = _Shape(), torch.ones(2, 3)
    shape.learn(nn.Identity(), (value,), {}, (value * 2, None))
    given = torch.zeros(2, 3)
    found = shape.pass_on(given, positions=None)
    assert found[0] is given and found[1] is None


class InOrder(nn.ModuleList):
    """Layers that a forward calls in an order of its own."""

    def __init__(self, layers: nn.ModuleList, order: list[int]) -> None:
        super().__init__(list(layers))
        self.order = order

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[place] for place in self.order)


class Ordered(Tokens):
    """Eight layers, in this order."""

    layers: int = 8
    order: str = "0,1,2,3,4,5,6,7"

    def model(self) -> nn.Module:
        model: Any = super().model()
        model.layers = InOrder(model.layers, [int(place) for place in self.order.split(",")])
        return cast(nn.Module, model)


@pytest.mark.parametrize(
    ("order", "traced"),
    [("0,1,2,3,4,5,6,7", 4), ("0,1,2,3,3,4,5,6,7", 8), ("0,1,1,2,3,4,5,6,7", 8), ("0,1,2,4,5,6,7", 8)],
    ids=["each once", "one that is left out twice", "one that stands for others twice", "one never"],
)
def test_blocks_that_run_twice_or_never_are_traced_in_full(order: str, traced: int) -> None:
    short, full = (rehearsed(Ordered(order=order), "fsdp", 2, full=full) for full in (False, True))
    assert (short.traced, full.traced) == (traced, 8)
    assert (short.flops, short.peak_bytes) == pytest.approx((full.flops, full.peak_bytes), rel=0.01)


def test_what_changes_the_shape_is_traced_in_full() -> None:
    with pytest.raises(NotShortened):
        _Shape().learn(nn.Linear(3, 4), (torch.ones(2, 3),), {}, torch.ones(2, 4))
    with pytest.raises(NotShortened):
        _Shape().learn(nn.Identity(), (torch.ones(2, 3),), {}, (torch.ones(2, 3), torch.ones(2, 3)))
