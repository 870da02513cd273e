"""Zeros in the shape of what a module returns, without its being computed."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from allranks.data.random_keys import seed_all
from allranks.errors import LayoutError
from allranks.parallel import stand_in
from allranks.parallel.stand_in import StandIns, is_floating, on_meta


def made(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return StandIns().make("part", on_meta(module), True, args, kwargs)


def test_shapes_and_types_are_those_of_the_module() -> None:
    output, (hidden, cell) = made(nn.LSTM(3, 5), torch.ones(2, 4, 3))
    assert output.shape == (2, 4, 5) and hidden.shape == cell.shape == (1, 4, 5)
    assert not output.any() and output.device.type == "cpu"
    assert made(nn.Linear(3, 5).double(), torch.ones(2, 3).double()).dtype is torch.float64


def test_what_was_called_last_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    found, twin = StandIns(), on_meta(nn.Linear(3, 5))
    calls: list[int] = []
    twin.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    monkeypatch.setattr(stand_in, "SHAPES", 2)
    for rows in (1, 2, 1, 3, 1, 2):
        assert found.make("part", twin, True, (torch.ones(rows, 3),), {}).shape == (rows, 5)
    assert calls == [1, 2, 3, 2]


class Draws(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value if random.random() + float(torch.rand(())) < 3 else value[:1]


def test_shapes_that_are_asked_for_draw_nothing() -> None:
    seed_all(5)
    expected = random.random(), float(torch.rand(()))
    seed_all(5)
    assert made(Draws(), torch.ones(2, 3)).shape == (2, 3)
    assert (random.random(), float(torch.rand(()))) == expected


class Looks(nn.Module):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2 if bool(value.any()) else value


def test_what_looks_at_values_is_taken_to_return_what_it_is_given() -> None:
    assert made(Looks(), torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2
    with pytest.raises(LayoutError, match="part belongs to another stage of the pipeline, and what it returns is not"):
        made(Looks(), torch.arange(3))


def test_a_copy_on_the_meta_device_keeps_what_is_frozen() -> None:
    twin = on_meta(nn.BatchNorm1d(3).requires_grad_(False))
    assert all(t.is_meta and not t.requires_grad for t in (*twin.parameters(), *twin.buffers()))
    assert is_floating(torch.ones(2)) and not is_floating(torch.arange(2)) and not is_floating(1.0)
