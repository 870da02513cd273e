"""Clean: a compiled model, with a dropout in it, under DDP.

verify: --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def batch(seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2]


data = [batch(seed) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 2))
    model = torch.compile(model, backend="aot_eager")
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
