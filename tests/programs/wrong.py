"""A user's Task file: a straight line to learn, wrong in the way that `task.wrong` names."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Line(allranks.Task):
    """Learn the sum of two numbers."""

    wrong: str = ""
    num_points: int = 20

    def dataset(self, split: str) -> TensorDataset:
        """`num_points` pairs and their sums."""
        pairs = torch.randn(self.num_points, 2, generator=torch.Generator().manual_seed(1))
        return TensorDataset(pairs, pairs.sum(1, keepdim=True))

    def model(self) -> nn.Module:
        """One linear layer."""
        return nn.Linear(2, 1)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed squares, or what is wrong."""
        squares: torch.Tensor = (output - batch[1]) ** 2
        wrongs = {"mean": squares.mean(), "vector": squares, "detached": squares.detach().sum()}
        return wrongs.get(self.wrong, squares.sum())

    def targets(self, batch: Any) -> int:
        """One a sample."""
        return len(batch[1])

    def state_dict(self) -> dict[str, Any]:
        """Nothing, or what no checkpoint can hold."""
        return {"mean": torch.zeros(1)} if self.wrong == "state" else {}
