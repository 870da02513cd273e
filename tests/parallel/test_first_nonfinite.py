"""What is seen first, forward and backward, by its logical name."""

import math

import torch
from torch import nn

from allranks.parallel.first_nonfinite import FirstNonfinite, Sighting


class Spoiler(nn.Module):
    """Multiplies by `factor`, and the gradient by `backward`."""

    def __init__(self, factor: float = 1.0, backward: float = 1.0) -> None:
        super().__init__()
        self.factor, self.backward = factor, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.backward != 1.0 and x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.backward)
        return x * self.factor


def see(*parts: nn.Module, x: float = 1.0, which: str = "") -> Sighting | None:
    model = nn.Sequential(*parts)
    watch = FirstNonfinite()
    with watch.watching({which: model}):
        model(torch.full((2, 3), x)).sum().backward()
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    return watch.found


def test_where_it_is_seen_first() -> None:
    linear = nn.Linear(3, 3)
    assert see(linear, Spoiler()) is None
    assert see(linear, x=math.nan) == Sighting("input", "")
    assert see(linear, Spoiler(math.nan), nn.Linear(3, 3)) == Sighting("output", "1", "Spoiler")
    assert see(linear, Spoiler(), nn.Tanh(), Spoiler(backward=math.inf)) == Sighting("output_gradient", "1", "Spoiler")
    assert see(linear, Spoiler(math.nan), which="critic") == Sighting("output", "critic.1", "Spoiler")


def test_a_parameter_whose_gradient_alone_is_bad() -> None:
    linear = nn.Linear(3, 3)
    linear.weight.register_hook(lambda gradient: gradient * math.nan)
    watch = FirstNonfinite()
    with watch.watching({"": nn.Sequential(nn.Linear(3, 3), linear)}):
        linear(torch.ones(2, 3)).sum().backward()
    assert watch.found == Sighting("parameter_gradient", "1.weight", "Linear")


def test_masks_are_made_of_infinities_below_zero() -> None:
    assert see(nn.Linear(3, 3), Spoiler(), nn.Softmax(-1)) is None

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.masked_fill(torch.tensor([False, False, True]), -math.inf)

    assert see(nn.Linear(3, 3), Masked(), nn.Softmax(-1)) is None


def test_names_are_without_wrappers() -> None:
    wrapped = nn.Module()
    wrapped._orig_mod = Spoiler(math.nan)
    wrapped.forward = wrapped._orig_mod.__call__
    found = see(nn.Linear(3, 3), wrapped)
    assert found is not None and found.name == "1"
