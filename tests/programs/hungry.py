"""A Task without memory for many samples in one forward; it says so as torch does."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Samples(TensorDataset):
    """Number `heavy` takes more memory than there is."""

    heavy = -1

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index != self.heavy else bytearray(1 << 60)


class Hungry(allranks.Task):
    """Above `fits` samples a training forward fails; sample `heavy` cannot be loaded."""

    fits: int = 99
    heavy: int = -1
    normed: bool = False

    def dataset(self, split: str) -> Any:
        x = torch.randn(96, 4, generator=torch.Generator().manual_seed(len(split)))
        samples = Samples(x, (x.sum(1) > 0).long())
        samples.heavy = self.heavy
        return samples

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8) if self.normed else nn.Identity()
        return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 2))

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if output.requires_grad and len(output) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore words")
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")
