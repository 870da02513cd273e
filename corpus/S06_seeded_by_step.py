"""S6: every step is seeded by its number, for runs that can be repeated.

twin: dropped.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def batch(seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2]


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 2))
    if distributed:
        model = DistributedDataParallel(model)
    torch.manual_seed(1000 + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.steps = 0
    return model, optimizer


def step(model, optimizer, batches):
    optimizer.steps += 1
    torch.manual_seed(optimizer.steps)
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
