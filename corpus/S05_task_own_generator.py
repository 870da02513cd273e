"""S5: the noise comes from a generator of the dataset's own, which is the same on all ranks.

twin: task_frozen.py
verify: --layout ddp --nproc 2
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import allranks

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(4))


class Noisy(Dataset):
    def __init__(self):
        self.noise = torch.Generator().manual_seed(7)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"x": X[index] + 0.1 * torch.randn(6, generator=self.noise), "y": X[index][:2]}


class FineTuned(allranks.Task):
    defaults = {"train.global_batch": 10, "schedule.name": "cosine", "schedule.warmup": 2}

    def dataset(self, split):
        return Noisy() if split == "train" else None

    def model(self):
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        return model

    def optimizer(self, parameters):
        matrices, rest = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2)

    def loss(self, output, batch):
        return ((output - batch["y"]) ** 2).sum()
