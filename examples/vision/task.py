"""A convolutional network with BatchNorm on handwritten digits: allranks train examples/vision/task.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import allranks


def stage(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),  # over the samples of all processes, as on one device
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Vision(allranks.Task):
    width: int = 16
    defaults = {"train.epochs": 6, "train.global_batch": 64, "optimizer.lr": 0.005, "schedule.name": "cosine"}

    def dataset(self, split):
        digits = load_digits()
        images, labels = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        chosen = held_out if split == "validation" else ~held_out
        return TensorDataset(images[chosen], labels[chosen])

    def model(self):
        width = self.width
        head = nn.Sequential(nn.Flatten(), nn.Linear(4 * width * 2, 10))
        return nn.Sequential(stage(1, width), stage(width, 2 * width), head)

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def metrics(self, output, batch):
        return {"accuracy": ((output.argmax(dim=1) == batch[1]).sum(), len(batch[1]))}
