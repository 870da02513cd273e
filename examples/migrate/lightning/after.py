"""Which side of a curved surface a point lies on: allranks train train.py --nproc 2"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks


def make_samples(num_samples: int, seed: int) -> TensorDataset:
    points = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())


class Sides(allranks.Task):
    width: int = 32
    defaults = {
        "train.epochs": 3,
        "train.global_batch": 64,  # over all processes and both micro-batches of a step
        "train.micro_batch": 16,
        "train.max_norm": 1.0,
        "optimizer.lr": 1e-2,
        "schedule.name": "linear",
    }

    def dataset(self, split):
        return make_samples(2048, seed=1) if split == "train" else make_samples(1000, seed=2)

    def model(self):
        return nn.Sequential(nn.Linear(4, self.width), nn.ReLU(), nn.Linear(self.width, 2))

    def loss(self, output, batch):  # the SUM over the samples of the batch
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(dim=1) == batch[1]).sum(), len(batch[1]))}
