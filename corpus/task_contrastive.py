"""Clean: a Task whose loss compares the samples of all ranks, and says so.

verify: --layout ddp --nproc 2
"""

import torch
from torch import nn

import allranks


class Pairs(allranks.Task):
    defaults = {"train.global_batch": 9, "optimizer.name": "sgd"}
    coupled = True

    def dataset(self, split):
        if split != "train":
            return None
        x = torch.randn(36, 6, generator=torch.Generator().manual_seed(1))
        return [{"x": row, "near": row + 0.1 * row.roll(1)} for row in x]

    def model(self):
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))

    def inputs(self, batch):
        return (torch.cat([batch["x"], batch["near"]]),)

    def targets(self, batch):
        return len(batch["x"])

    def loss(self, output, batch):
        first, second = nn.functional.normalize(output, dim=1).chunk(2)
        every, offset = self.world.gather(second), self.world.offset(second)
        places = offset + torch.arange(len(first))
        return nn.functional.cross_entropy(first @ every.T / 0.5, places, reduction="sum")
