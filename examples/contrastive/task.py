"""Digits without labels: two noisy views of an image are to find each other among those of all processes."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import allranks


class Views(torch.utils.data.Dataset):
    """Two views of each image, a few of its pixels dimmed; they draw, so each position has numbers of its own."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {name: self.images[index] * torch.empty(64).uniform_(0.3, 1) for name in ("first", "second")}


class Contrastive(allranks.Task):
    temperature: float = 0.1
    defaults = {"train.epochs": 8, "train.global_batch": 128, "optimizer.lr": 0.003, "schedule.name": "cosine"}
    coupled = True  # the loss compares samples: how many share a forward is fixed, whatever the number of processes

    def dataset(self, split):
        images = torch.tensor(load_digits().data).float() / 16
        held_out = torch.arange(len(images)) % 5 == 0
        return Views(images[held_out if split == "validation" else ~held_out])

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

    def inputs(self, batch):  # both views in one forward, first those of `first`
        return (torch.cat([batch["first"], batch["second"]]),)

    def loss(self, output, batch):  # the SUM over this process's samples, each compared with everybody's
        scores, places = self.scores(output)
        return functional.cross_entropy(scores / self.temperature, places, reduction="sum")

    def metrics(self, output, batch):
        scores, places = self.scores(output)
        return {"found": ((scores.argmax(dim=1) == places).sum(), len(places))}

    def scores(self, output):
        first, second = functional.normalize(output, dim=1).chunk(2)
        everyone = self.world.gather(second)
        return first @ everyone.T, self.world.offset(second) + torch.arange(len(first), device=first.device)
