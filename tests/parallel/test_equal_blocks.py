"""Blocks are equal where nothing that can be seen of them differs, but for their own numbers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from allranks.parallel.equal_blocks import compared_tensors, kinds_of


class Block(nn.Module):
    """A layer that knows some things."""

    def __init__(self, **known: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        for name, value in known.items():
            setattr(self.inner, name, value)


@dataclass(eq=False)
class Settings:
    """An object without an order or an equality."""

    window: int
    within: Any = None


def windowed(window: int) -> Callable[[Any], Any]:
    def attend(x: Any) -> Any:
        return x[:window]

    return attend


def local_kind(factor: int) -> nn.Module:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * factor

    return Scaled(2, 2)


def scale(x: Any, factor: int = 1) -> Any:
    return x * factor


def noted(module: Any, given: Any) -> None: ...


def other(module: Any, given: Any) -> None: ...


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"dilation": (1, 1)}, {"dilation": (2, 2)}),
        ({"sizes": [1, (2, "a")]}, {"sizes": [1, (2, "b")]}),
        ({"by": {"a": 1}}, {"by": {"a": 2}}),
        ({"kinds": {1, 2}}, {"kinds": {1, 3}}),
        ({"attend": windowed(8)}, {"attend": windowed(64)}),
        ({"attend": functools.partial(scale, factor=1)}, {"attend": functools.partial(scale, factor=2)}),
        ({"attend": lambda x: x + 1}, {"attend": lambda x: x + 2}),
        ({"attend": torch.relu}, {"attend": torch.sigmoid}),
        ({"attend": Settings(8).__repr__}, {"attend": Settings(8).__str__}),
        ({"made": nn.ReLU}, {"made": nn.GELU}),
        ({"config": Settings(8)}, {"config": Settings(64)}),
        ({"config": Settings(8, Settings(1))}, {"config": Settings(8, Settings(2))}),
        ({"table": numpy.arange(3)}, {"table": numpy.zeros(3, numpy.int64)}),
        ({"rate": numpy.float32(1)}, {"rate": numpy.float32(2)}),
        ({"mask": torch.ones(3)}, {"mask": torch.zeros(3)}),
        ({"masks": [torch.ones(3)]}, {"masks": [torch.zeros(3)]}),
        ({"training": True}, {"training": False}),
        ({"extra": nn.Linear(2, 2)}, {"extra": None}),
        ({"tied": nn.Parameter(torch.ones(2))}, {"tied": nn.Parameter(torch.ones(2), requires_grad=False)}),
        ({"wide": nn.Parameter(torch.ones(2, 3))}, {"wide": nn.Parameter(torch.ones(3, 2).t())}),
    ],
)
def test_what_differs(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert kinds_of([Block(**one), Block(**two), Block(**one)]) == [0, 1, 0]


def test_what_is_made_anew_for_each_block_is_no_difference() -> None:
    makers: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"attend": windowed(8), "config": Settings(8, [Settings(1)]), "table": numpy.arange(3)},
        lambda: {"attend": functools.partial(scale, factor=2), "mask": torch.ones(3)},
        lambda: {"attend": Settings(8).__repr__, "draw": torch.Generator()},
    )
    for make in makers:
        assert kinds_of([Block(**make()) for _ in range(3)]) == [0, 0, 0]
    assert kinds_of([local_kind(2), local_kind(2), local_kind(3)]) == [0, 0, 1]


def test_what_leads_back_to_itself() -> None:
    def ring() -> Settings:
        made = Settings(8)
        made.within = [made]
        return made

    assert kinds_of([Block(config=ring()), Block(config=ring())]) == [0, 0]


def test_hooks_and_parameters_that_are_shared() -> None:
    plain, one, two, same, learns = (Block() for _ in range(5))
    one.inner.register_forward_pre_hook(noted)
    two.inner.register_forward_pre_hook(other)
    same.inner.register_forward_pre_hook(noted)
    learns.inner.weight.register_hook(scale)
    assert kinds_of([plain, one, two, same, learns]) == [0, 1, 2, 1, 3]
    first, tied = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    tied[1].weight = tied[0].weight
    assert kinds_of([first, tied]) == [0, 1]


def buffered(value: torch.Tensor, *, kept: bool = True) -> nn.Module:
    made = Block()
    made.register_buffer("mask", value, persistent=kept)
    return made


def test_buffers_by_value_where_they_have_one() -> None:
    ones, zeros = torch.ones(4), torch.zeros(4)
    assert kinds_of([buffered(ones), buffered(zeros), buffered(ones.clone()), buffered(ones, kept=False)]) == [
        *(0, 1, 0, 2)
    ]
    assert kinds_of([buffered(ones), buffered(zeros)], most=4) == [0, 1]
    assert kinds_of([buffered(ones), buffered(zeros)], most=3) == [0, 0], "of the same shape"
    assert kinds_of([buffered(ones), buffered(torch.ones(5)), buffered(ones.double())], most=3) == [0, 1, 2]
    assert kinds_of([buffered(torch.full((2,), float("nan"))) for _ in range(2)]) == [0, 1], "the safe side"
    for place in (torch.device("meta"), FakeTensorMode()):
        with place:
            assert kinds_of([buffered(torch.ones(4)), buffered(torch.zeros(4)), buffered(torch.ones(5))]) == [0, 0, 1]


def test_what_is_compared_by_value() -> None:
    block = Block(mask=torch.ones(2), masks=(torch.ones(3), 1))
    block.register_buffer("table", torch.ones(4), persistent=False)
    assert sorted(tensor.numel() for tensor in compared_tensors(block)) == [2, 3, 4]


def test_numbers_that_count_the_blocks() -> None:
    assert kinds_of([Block(layer_idx=n) for n in range(4)]) == [0] * 4
    mixed = [Block(layer_idx=n) if n % 3 else Block(kind="other", layer_id=n) for n in range(7)]
    assert kinds_of(mixed) == [0, 1, 1, 0, 1, 1, 0], "each kind's own, by its place among all"
    assert kinds_of([Block(layer_idx=n, sliding=n % 2 == 0) for n in range(4)]) == [0, 1, 0, 1]
    assert kinds_of([Block(layer_idx=n) for n in (0, 1, 3)]) == [0, 1, 2]
    assert kinds_of([Block(layer_idx=str(n)) for n in range(3)]) == kinds_of([Block(width=n) for n in range(3)])


def test_what_cannot_be_printed_is_compared_without() -> None:
    class Loud(nn.Linear):
        def extra_repr(self) -> str:
            raise ValueError("not now")

    assert kinds_of([Loud(2, 2), Loud(2, 2), Loud(2, 3)]) == [0, 0, 1]
    assert kinds_of([nn.LazyLinear(2), nn.LazyLinear(2), nn.Linear(1, 2)]) == [0, 0, 1]
