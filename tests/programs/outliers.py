"""A user's Task file: points in the plane, some of whose labels are given an absurd weight."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Outliers(allranks.Task):
    """Learn which side of a curve a point lies on; the samples in `bad` (`17,40`) count `weight` times."""

    bad: str = ""
    weight: float = 1000.0
    num_points: int = 503

    def dataset(self, split: str) -> TensorDataset:
        """`num_points` points to train on, 20 to validate."""
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        points = torch.randn(self.num_points if split == "train" else 20, 2, generator=generator)
        weights = torch.ones(len(points))
        if split == "train":
            weights[[int(number) for number in self.bad.split(",") if number]] = self.weight
        return TensorDataset(points, (points[:, 1] > torch.sin(2 * points[:, 0])).long(), weights)

    def model(self) -> nn.Module:
        """Two layers with dropout between them."""
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))

    def inputs(self, batch: Any) -> Any:
        """The points."""
        return (batch[0],)

    def targets(self, batch: Any) -> int:
        """One each."""
        return len(batch[1])

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Cross-entropy, summed by weight."""
        losses = nn.functional.cross_entropy(output, batch[1], reduction="none")
        return losses @ torch.as_tensor(batch[2])
