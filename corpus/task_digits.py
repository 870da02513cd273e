"""Clean: a Task with dropout, AdamW, clipping and an accuracy.

verify: --layout ddp --nproc 2
verify: --layout fsdp --nproc 2
verify: --layout tp=2
verify: --layout ddp --nproc 2 train.precision=float16
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Digits(allranks.Task):
    width: int = 16
    defaults = {"train.global_batch": 16, "optimizer.name": "adamw", "train.max_norm": 0.5}

    def dataset(self, split):
        number = 45 if split == "train" else 13
        x = torch.randn(number, 6, generator=torch.Generator().manual_seed(number))
        return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())

    def model(self):
        width = self.width
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(1) == batch[1]).sum(), len(batch[1]))}
