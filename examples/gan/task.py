"""Two models that train against each other: one draws digits, one tells them from real ones."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import allranks

REAL, DRAWN = 1.0, 0.0


class Gan(allranks.Task):
    noise: int = 16
    defaults = {"train.epochs": 5, "train.global_batch": 64}

    def dataset(self, split):
        return torch.tensor(load_digits().data).float() / 16 if split == "train" else None

    def model(self):  # several models by name; so are the optimizers
        return {
            "generator": nn.Sequential(nn.Linear(self.noise, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()),
            "critic": nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
        }

    def optimizer(self, parameters):
        return {
            name: torch.optim.Adam(parameters[name], lr=lr, betas=(0.5, 0.999))
            for name, lr in (("critic", 2e-4), ("generator", 1e-3))
        }

    def step(self, models, batch):  # after each yield allranks runs the backward and updates the model of that name
        drawn = models["generator"](torch.randn(len(batch), self.noise, device=batch.device))
        told = self.surprise(models["critic"](batch), REAL) + self.surprise(models["critic"](drawn.detach()), DRAWN)
        yield "critic", told, len(batch)
        yield "generator", self.surprise(models["critic"](drawn), REAL), len(batch)

    def surprise(self, scores, truth):
        return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth), reduction="sum")
