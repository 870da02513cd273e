"""A user's Task file: points in the plane, two classes, with dropout so that randomness shows."""

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Points(allranks.Task):
    """Learn which side of a curve a point lies on."""

    width: int = 16
    num_points: int = 203
    pause: float = 0.0
    boom_rank: int = -1

    def dataset(self, split: str) -> TensorDataset:
        """`num_points` points to train on, 50 to validate."""
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        points = torch.randn(self.num_points if split == "train" else 50, 2, generator=generator)
        return TensorDataset(points, (points[:, 1] > torch.sin(2 * points[:, 0])).long())

    def model(self) -> nn.Module:
        """Two layers with dropout between them."""
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(self.width, 2))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy; pauses, and fails at the 20th call, where the settings say so."""
        time.sleep(self.pause)
        self._calls = getattr(self, "_calls", 0) + 1
        if int(os.environ.get("RANK", "0")) == self.boom_rank and self._calls == 20:
            raise ValueError("the user's own mistake")
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        """Accuracy."""
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}
