"""Clean: a Task of two models that train against each other.

verify: --layout ddp --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import allranks


class Gan(allranks.Task):
    defaults = {"train.global_batch": 8}

    def dataset(self, split):
        return torch.randn(40, 6, generator=torch.Generator().manual_seed(2)) if split == "train" else None

    def model(self):
        return {
            "generator": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6)),
            "critic": nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        }

    def step(self, models, batch):
        drawn = models["generator"](batch[:, :4].cos())
        told = self.surprise(models["critic"](batch), 1.0) + self.surprise(models["critic"](drawn.detach()), 0.0)
        yield "critic", told, len(batch)
        yield "generator", self.surprise(models["critic"](drawn), 1.0), len(batch)

    def surprise(self, scores, truth):
        return binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth), reduction="sum")
