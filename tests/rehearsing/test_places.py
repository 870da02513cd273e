"""Whose code runs: by module in a forward, by the forward that is undone in a backward, and by line."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.rehearsing.places import LOSS, Places, asked_by_engine, line_that_asked, starred


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


def test_equal_parts_have_one_name() -> None:
    assert starred("layers.31.mlp.2") == "layers.*.mlp.*"
    assert starred("conv2d.3") == "conv2d.*"
    assert starred("") == ""


def test_the_line_that_asked() -> None:
    assert line_that_asked().startswith("test_places.py:")
    assert line_that_asked().endswith(" test_the_line_that_asked")
    assert not asked_by_engine()
