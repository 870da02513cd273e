"""Whether what spreads a model was called itself."""

from typing import Any

import torch
from torch import nn

from allranks.verifying.observer import Observer
from allranks.verifying.own_loop import OwnLoop, Setting
from allranks.verifying.program import Program
from allranks.verifying.wrapper_watch import WrapperWatch, is_below


class DataParallelOfMine(nn.Module):
    """As DDP is to a program: what it wraps is its `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.module(x)
        return found


X = torch.ones(3, 2)


def test_what_nobody_has_called_since_the_last_time_was_passed_by() -> None:
    modules = {"d": DataParallelOfMine(), "g": DataParallelOfMine(), "plain": nn.Linear(2, 1)}
    watch = WrapperWatch(modules)
    modules["d"](X)
    assert watch.take() == ("g",)
    modules["g"].module(X)  # type: ignore[operator]
    assert watch.take() == ("d", "g")
    with torch.no_grad():
        modules["d"](X), modules["g"](X)
    assert watch.take() == ("d", "g"), "a look at the outputs is no training"


def test_nothing_is_watched_any_longer_or_where_a_module_is_compiled() -> None:
    compiled = DataParallelOfMine()
    compiled._compiled_call_impl = compiled.forward
    assert WrapperWatch({"": compiled}).take() == ()
    watch = WrapperWatch({"": (module := DataParallelOfMine())})
    watch.remove()
    module(X)
    assert watch.take() == ("",) and not module._forward_pre_hooks


def test_parameters_are_below_modules_by_whole_names() -> None:
    assert is_below("a.weight", ["a"]) and is_below("a.weight", ["b", ""])
    assert not is_below("ab.weight", ["a"]) and not is_below("a.weight", [])


def test_an_own_loop_tells_in_which_steps_its_wrapper_was_passed_by() -> None:
    def build(distributed: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DataParallelOfMine()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, batches: Any) -> None:
        optimizer.zero_grad()
        for past, x in batches:
            output = (model.module if past else model)(x)
            output.sum().backward()
        optimizer.step()

    data = [[(True, X), (True, X)], [(False, X), (True, X)], [(True, X)]]
    program, observer = Program(build, step, lambda rank, size: data), Observer()
    with observer.watching():
        record = OwnLoop(program, Setting(3), 0, 1, False, observer).run()
    assert record.error == "" and [one.past for one in record.steps] == [("",), (), ("",)]
