"""A Task without memory for many samples in one forward, or for one of them; it says so as torch and Python do."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import allranks


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Number `heavy` takes more memory than there is."""

    def __init__(self, x: torch.Tensor, heavy: int) -> None:
        self.x, self.y, self.heavy = x, (x.sum(1) > 0).long(), heavy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == self.heavy:
            bytearray(1 << 60)
        return self.x[index], self.y[index]


class Hungry(allranks.Task):
    """Above `fits` samples a training forward fails; sample `heavy` cannot be loaded."""

    fits: int = 99
    heavy: int = -1
    normed: bool = False

    def dataset(self, split: str) -> Any:
        return Samples(torch.randn(96, 4, generator=torch.Generator().manual_seed(len(split))), self.heavy)

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self.normed else nn.Identity()
        return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 2))

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if output.requires_grad and len(output) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")
