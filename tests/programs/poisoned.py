"""A Task with one sample that kills the process that meets it: while it is loaded, or in the loss."""

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from allranks import Task


class Samples(Dataset[Any]):
    """Numbers; the one at `bad` is fatal."""

    draws = False

    def __init__(self, num_samples: int, bad: int, loading: bool) -> None:
        self.num_samples, self.bad, self.loading = num_samples, bad, loading

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if self.loading and index == self.bad:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((2,), index / self.num_samples), torch.tensor(index)


class Poisoned(Task):
    """`bad`: the fatal sample; `loading`: whether it kills while it is loaded, or where its loss is taken."""

    num_samples: int = 40
    bad: int = 11
    loading: bool = False

    def dataset(self, split: str) -> Any:
        return Samples(self.num_samples, self.bad, self.loading) if split == "train" else None

    def model(self) -> Any:
        return nn.Linear(2, 1)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        if not self.loading and (batch[1] == self.bad).any():
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = (output[:, 0] - batch[0][:, 0]).square().sum()
        return loss

    def targets(self, batch: Any) -> int:
        return len(batch[1])
