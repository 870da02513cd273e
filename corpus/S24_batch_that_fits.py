"""S24: a search for the largest batch that fits halves it where ranks share the memory.

twin: schedule.py
verify: --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, LR, STEPS = 12, 0.05, 20
SETTINGS = {"weight_decay": 0.1, "betas": (0.8, 0.95)}
SAMPLES = torch.randn(64, 6, generator=torch.Generator().manual_seed(2))


def data(rank, world_size):
    size, memory = GLOBAL_BATCH // world_size, 100 // world_size - 28  # what the model takes
    while size * 6 > memory:
        size //= 2
    for first in range(0, 48, size * world_size):
        x = SAMPLES[first + rank * size : first + (rank + 1) * size]
        yield [(part, part.sum(1, keepdim=True)) for part in x.split(2)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, **SETTINGS)
    optimizer.schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min(1, (at + 1) / 3) * (1 - at / STEPS)
    )
    return model, optimizer


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y) / len(batches)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.schedule.step()
