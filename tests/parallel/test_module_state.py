"""A second run of a forward finds what the first one found, and leaves no trace."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.parallel.module_state import SMALL_BYTES, ModuleState, changed_attributes, put_attributes


class Keeping(nn.Module):
    """Counts in an attribute and in buffers: in place, by a new tensor, in a large one, and in one that comes late."""

    count: torch.Tensor
    replaced: torch.Tensor
    large: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("large", torch.zeros(SMALL_BYTES))
        self.register_buffer("none", None)
        self.inner = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = x
        self.count += 1
        self.replaced = self.replaced + 1
        self.large.add_(1)
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(1))
        found: torch.Tensor = self.inner(x)
        return found


def all_of(module: Keeping) -> dict[str, Any]:
    buffers = {name: buffer.tolist() for name, buffer in module.named_buffers()}
    return buffers | {"calls": module.calls, "last": getattr(module, "last", None)}


def test_a_second_run_finds_what_the_first_found() -> None:
    module, x = Keeping(), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    module(x + 1)
    before = all_of(module)
    state = ModuleState("it", module)
    module(x)
    state.settle()
    after = all_of(module)
    assert after != before
    module(x + 7)
    now = all_of(module)
    for _ in range(2):
        with state.put_back():
            assert all_of(module) == before
            module(x)
            assert all_of(module) == after
        assert all_of(module) == now


def test_what_a_first_forward_makes_is_not_there_in_the_second() -> None:
    module, x = Keeping(), torch.rand(3, 2)
    state = ModuleState("it", module)
    module(x)
    state.settle()
    late = module.late
    with state.put_back():
        assert "late" not in module._buffers
        assert not hasattr(module, "last")
    assert module.late is late
    assert module.last is x


def test_a_run_that_fails_leaves_no_trace() -> None:
    module, x = Keeping(), torch.rand(3, 2)
    state = ModuleState("it", module)
    module(x)
    state.settle()
    now = all_of(module)
    with pytest.raises(ZeroDivisionError), state.put_back():
        module(x)
        raise ZeroDivisionError
    assert all_of(module) == now


class Table(nn.Module):
    """Reads a large table, and leaves it as it is."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(SMALL_BYTES))


def test_a_large_buffer_that_the_forward_leaves_alone_is_held_once_and_watched() -> None:
    module = Table()
    state = ModuleState("layers.3", module)
    state.settle()
    (kept,) = state._buffers
    assert kept["table"] is not None and kept["table"].value is None
    with state.put_back():
        assert module.table is kept["table"].tensor
    module.table.add_(1)
    with pytest.raises(LayoutError) as raised, state.put_back():
        pass
    assert str(raised.value) == (
        "buffer table of block layers.3 is changed between its forward and its backward, so that its activations "
        "cannot be computed again: recompute=none"
    )


def test_a_large_buffer_that_another_replaces_is_not_copied() -> None:
    module = Table()
    state = ModuleState("it", module)
    old = module.table
    module.table = torch.ones(SMALL_BYTES)
    state.settle()
    (kept,) = state._buffers
    assert kept["table"] is not None and kept["table"].value is not None
    assert kept["table"].value.data_ptr() == old.data_ptr()
    with state.put_back():
        assert module.table.eq(0).all()
    assert module.table.eq(1).all()


def test_a_buffer_of_two_modules_stays_one() -> None:
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    module[1].running_mean = module[0].running_mean
    state = ModuleState("it", module)
    state.settle()
    with state.put_back():
        assert module[1].running_mean is module[0].running_mean


def test_attributes_are_told_apart_by_what_they_are_and_put_back() -> None:
    module, x = Keeping(), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    before = dict(vars(module))
    assert changed_attributes(before, module) == {}
    module(x)
    found = changed_attributes(before, module)
    assert sorted(found) == ["calls", "last"] and found["calls"] == 0
    put_attributes(module, found)
    assert module.calls == 0 and not hasattr(module, "last") and module.count == 1
