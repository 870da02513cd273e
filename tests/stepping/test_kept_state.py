"""KeptState: what a forward and a loss may change is put back, as often as they run."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn

from allranks.stepping import kept_state
from allranks.stepping.kept_state import KeptState


class Bank:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.count = 0

    def take(self, row: int) -> None:
        self.rows.append(row)
        self.count += 1


class Given:
    """A Task, as far as attributes go."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.banks = (Bank(), {"inner": Bank()})
        self.centre = torch.zeros(2)
        self.teacher = nn.Linear(2, 2).requires_grad_(False)

    @cached_property
    def costly(self) -> object:
        return object()


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [1], lambda x: x.append(2)),
    "set": (lambda: {1}, lambda x: x.add(2)),
    "dict": (lambda: {1: 2}, lambda x: x.update({2: 3})),
    "nested": (lambda: {"a": [deque([1])]}, lambda x: x["a"][0].append(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda x: x.append(3)),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda x: x.move_to_end("a")),
    "default": (lambda: defaultdict(list, {1: [2]}), lambda x: (x[1].append(3), x[2].append(4))),
    "counter": (lambda: Counter("ab"), lambda x: x.update("bc")),
    "tuple": (lambda: ([1], 2), lambda x: x[0].clear()),
    "array": (lambda: numpy.zeros(3), lambda x: x.__iadd__(1)),
    "tensor": (lambda: torch.zeros(3), lambda x: x.add_(1)),
    "through data": (lambda: torch.zeros(3), lambda x: setattr(x, "data", x.data + 1)),
    "of another shape": (lambda: torch.zeros(3), lambda x: setattr(x, "data", torch.ones(4))),
    "with a history": (lambda: torch.zeros(3), lambda x: x.add_(torch.ones(3, requires_grad=True))),
    "without number": (lambda: torch.full((3,), float("nan")), lambda x: x.fill_(1)),
    "a hidden module": (lambda: [nn.BatchNorm1d(2)], lambda x: x[0](torch.randn(3, 2))),
}


def words(value: Any) -> str:
    return repr([module.state_dict() for module in value] if isinstance(value, list) and value[0] != 1 else value)


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_a_run_changes_is_put_back_each_time(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    for owner in (nn.Linear(2, 2), Given()):
        value = owner.held = make()  # type: ignore[union-attr]
        before = words(value)
        model, task = (owner, None) if isinstance(owner, nn.Module) else (nn.Linear(2, 2), owner)
        state = KeptState(model, task)
        for _ in range(2):
            with state.kept():
                change(value)
                assert words(value) != before
            assert owner.held is value and words(value) == before  # type: ignore[union-attr]
        assert not state.moved


def test_a_tasks_own_attributes_and_objects_are_put_back() -> None:
    task: Any = Given()
    seen, before = task.seen, task.teacher.weight.clone()
    with KeptState(nn.Linear(2, 2), task).kept():
        task.seen = [1]
        task.new = 3
        seen.append(2)
        for bank in (task.banks[0], task.banks[1]["inner"]):
            bank.take(1)
        task.teacher.weight.data.mul_(0.5)
        costly = task.costly
    assert task.seen is seen and not seen and not hasattr(task, "new")
    assert [(bank.rows, bank.count) for bank in (task.banks[0], task.banks[1]["inner"])] == [([], 0)] * 2
    assert torch.equal(task.teacher.weight, before)
    assert task.costly is costly, "computed once, and not once a run"


def momentum(model: nn.Sequential) -> None:
    """As they do who keep a second encoder that follows the first one."""
    for slow, fast in zip(model[1].parameters(), model[0].parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def test_a_frozen_encoder_that_follows_another_is_put_back() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    with KeptState(model).kept():
        momentum(model)
        assert not torch.equal(model[1].weight, before["1.weight"][1])
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0] and torch.equal(value, before[name][1])


def test_what_is_too_large_is_watched_and_named() -> None:
    model: Any = nn.Sequential(nn.Linear(90, 90), nn.Linear(90, 90).requires_grad_(False))
    model.names, model.few, model.array = list("abcdef"), [1], numpy.zeros(900)
    model.centre = torch.full((900,), float("nan"))
    with patch.multiple(kept_state, MOST_BYTES=100, MOST_ENTRIES=2):
        state = KeptState(model)
    with state.kept():
        pass
    assert not state.moved
    with state.kept():
        momentum(model)
        model.names.append("g")
        model.few.append(2)
        model.array += 1
    assert state.moved == {"1.weight", "1.bias", "names", "array"}
    assert model.few == [1]


def test_other_peoples_objects_are_left_alone() -> None:
    """They may be a thread's, or hold what may not be set back."""
    model: Any = nn.Linear(2, 2)
    model.generator = torch.Generator().manual_seed(3)
    model.library = nn.Linear(2, 2).weight.register_hook(lambda gradient: gradient)
    model.library.counted = 1
    state = KeptState(model)
    with state.kept():
        first = torch.rand(1, generator=model.generator)
        model.library.counted = 2
    assert not torch.equal(torch.rand(1, generator=model.generator), first), "another run draws other numbers"
    assert model.library.counted == 2
