"""S29: the Task's loss compares samples, of its own rank only, and does not say so.

twin: task_contrastive.py
verify: --layout ddp --nproc 2
refused: the loss couples the samples of a batch
"""

import torch
from torch import nn

import allranks


class Pairs(allranks.Task):
    defaults = {"train.global_batch": 9, "optimizer.name": "sgd"}

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
        places = torch.arange(len(first))
        return nn.functional.cross_entropy(first @ second.T / 0.5, places, reduction="sum")
