"""What examples/digits has learnt, taught to read digits that lie on their side, by a few parameters of its own.

allranks train examples/digits/task.py --run runs/digits
allranks train examples/fine_tuning/task.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Adapted(nn.Module):
    """A layer that stays as it is, and a narrow correction to it, at first nothing (LoRA, arXiv 2106.09685)."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, width, bias=False)
        self.up = nn.Linear(width, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


class FineTuning(allranks.Task):
    base: str = "runs/digits"  # the run whose model is loaded and stays as it is
    width: int = 8  # of the corrections
    defaults = {"train.epochs": 10, "train.global_batch": 32, "optimizer.lr": 0.01, "schedule.name": "cosine"}

    def dataset(self, split):  # the images of examples/digits, turned by a quarter
        digits = load_digits()
        images, labels = torch.tensor(digits.images).float().rot90(dims=(1, 2)) / 16, torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        chosen = held_out if split == "validation" else ~held_out
        return TensorDataset(images[chosen].flatten(1), labels[chosen])

    def model(self):
        layers = allranks.load(self.base)
        return nn.Sequential(*(Adapted(x, self.width) if isinstance(x, nn.Linear) else x for x in layers))

    def loss(self, output, batch):  # the SUM over the samples of the batch
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(dim=1) == batch[1]).sum(), len(batch[1]))}
