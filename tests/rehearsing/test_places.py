"""Whose code runs: by module in a forward, by the forward that is undone in a backward, and by line."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.rehearsing.places import LOSS, Places, answer_to_engine, line_that_asked, starred


class Seen(TorchDispatchMode):
    """Notes the module that runs, of every product."""

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = places
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten.mm.default or func is torch.ops.aten.addmm.default:
            self.names.append(self.places.running)
        return func(*args, **(kwargs or {}))


def test_a_backward_belongs_to_the_module_of_its_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    places = Places({"": model})
    seen = Seen(places)
    with places.following(), seen:
        output = model(torch.ones(5, 3))
        assert places.running == LOSS
        forward = list(seen.names)
        output.square().sum().backward()
    assert forward == ["0", "2"]
    assert seen.names[2:] == ["2", "2", "0"]


def test_where_a_gradient_goes_into_its_parameter_no_module_is_undone() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    places = Places({"": model})
    seen: list[tuple[bool, str]] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append((places.accumulating, places.running)))
    with places.following():
        output = model(torch.ones(5, 3))
        output.register_hook(lambda _: seen.append((places.accumulating, places.running)))
        output.square().sum().backward()
    assert seen == [(False, "0"), (True, ""), (True, "")]
    assert not places.accumulating


class Pair(nn.Module):
    """Calls its two layers in lines of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.first(value)
        found: torch.Tensor = self.rest(hidden)
        return found


def test_a_module_is_known_with_the_line_that_called_it() -> None:
    model = Pair()
    places = Places({"": model})
    with places.following():
        model(torch.ones(5, 3))
    lines = [places.called_by(name) for name in ("first", "rest", "rest.0")]
    start = Pair.forward.__code__.co_firstlineno
    assert lines == [f"test_places.py:{start + row} forward" for row in (1, 2, 2)]
    assert places.called_by("elsewhere") == ""


def test_equal_parts_have_one_name() -> None:
    assert starred("layers.31.mlp.2") == "layers.*.mlp.*"
    assert starred("conv2d.3") == "conv2d.*"
    assert starred("") == ""


def test_the_line_that_asked() -> None:
    assert line_that_asked().startswith("test_places.py:")
    assert line_that_asked().endswith(" test_the_line_that_asked")
    assert answer_to_engine() is None
