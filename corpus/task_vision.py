"""Clean: a Task with BatchNorm.

verify: --layout ddp --nproc 2
verify: --layout dp_shard=2
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Vision(allranks.Task):
    defaults = {"train.global_batch": 12, "optimizer.name": "sgd"}

    def dataset(self, split):
        images = torch.randn(31, 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(images, images.flatten(1).sum(1).gt(0).long())

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)
        )

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}
