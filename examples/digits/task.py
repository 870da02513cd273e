"""Handwritten digits (scikit-learn's 1797 scanned images): allranks train examples/digits/task.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import allranks


class Digits(allranks.Task):
    width: int = 128  # a setting: task.width=256 on the command line
    defaults = {"train.epochs": 20, "train.global_batch": 32, "optimizer.lr": 0.01, "schedule.name": "cosine"}

    def dataset(self, split):
        images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
        held_out = torch.arange(len(digits)) % 5 == 0
        chosen = held_out if split == "validation" else ~held_out
        return TensorDataset(images[chosen].float() / 16, digits[chosen])

    def model(self):
        return nn.Sequential(nn.Linear(64, self.width), nn.ReLU(), nn.Linear(self.width, 10))

    def loss(self, output, batch):  # the SUM over the samples of the batch
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(dim=1) == batch[1]).sum(), len(batch[1]))}
