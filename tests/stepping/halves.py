"""A Task whose loss leaves parameters out."""

from typing import Any

import torch
from torch import nn

from tests.training.tasks import Curve

SEARCHED = "every backward is searched for parameters without gradient"


class Half(Curve):
    """Half of its model is never used, or only for samples with a negative first coordinate."""

    sometimes: bool = False

    def model(self) -> Any:
        return HalfModel(self.sometimes)


class HalfModel(nn.Module):
    """Two layers, one of which may be left out."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.used, self.other, self.sometimes = nn.Linear(2, 2), nn.Linear(2, 2), sometimes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(x)
        return found + self.other(x) if self.sometimes and bool((x[:, 0] < 0).all()) else found
