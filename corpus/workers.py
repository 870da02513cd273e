"""Clean: a DataLoader with seeded shuffling of its own, whose batches are cut over the ranks.

verify: --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))


def data(rank, world_size):
    generator = torch.Generator().manual_seed(0)
    for x, y in DataLoader(TensorDataset(X, X[:, :2]), batch_size=8, shuffle=True, generator=generator):
        yield [(x[rank::world_size], y[rank::world_size])]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.NAdam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
