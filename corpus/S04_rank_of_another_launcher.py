"""S4: the rank is read from a variable that this launcher does not set.

twin: stream.py
verify: --nproc 2
"""

import os
from itertools import islice

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH = 6


class Lines(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = int(os.environ.get("SLURM_PROCID", 0)), world_size

    def __iter__(self):
        lines = torch.randn(48, 6, generator=torch.Generator().manual_seed(4))
        return islice(lines, self.rank, None, self.world_size)


def data(rank, world_size):
    for batch in DataLoader(Lines(rank, world_size), batch_size=GLOBAL_BATCH // world_size):
        yield [batch]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x in batches:
        loss = mse_loss(model(x), x)
        loss.backward()
    optimizer.step()
    return loss.item()
