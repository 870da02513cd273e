"""A user's Task file: examples/digits, of which allranks makes one gradient too large by `task.factor`."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.stepping import passes

TENSOR = "2.weight"
SMALL = 1.001
"""A factor below it is one of float64, one above it of a lower precision alone."""


class OffBy(allranks.Task):
    """Read digits."""

    factor: float = 1.0

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        if self.factor != 1.0:
            _multiply(self.factor)

    def dataset(self, split: str) -> TensorDataset | None:
        """Images and what they show."""
        images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
        return TensorDataset(images.float() / 16, digits) if split == "train" else None

    def model(self) -> nn.Module:
        """An MLP."""
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed over the images."""
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def _multiply(factor: float) -> None:
    real = passes.PlainPasses.run

    def run(self: Any, batch: Any, scale: Any) -> Any:
        for sums in real(self, batch, scale):
            gradient = self._spread.trainable()[TENSOR].grad
            assert gradient is not None
            if (self._spread.precision.name == "float64") == (factor < SMALL):
                gradient.mul_(factor)
            yield sums

    passes.PlainPasses.run = run  # type: ignore[method-assign]
