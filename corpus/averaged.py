"""Clean: an exponential moving average of the parameters under DDP.

verify: --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

DECAY = 0.9
micro_batches = 2


def batch(seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2]


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    average = {name: value.clone() for name, value in model.state_dict().items()}
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.average = average
    return model, optimizer


@torch.no_grad()
def follow(average, model):
    for name, value in getattr(model, "module", model).state_dict().items():
        average[name].lerp_(value, 1 - DECAY)


def state(model, optimizer):
    return optimizer.average


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y) / len(batches)
        loss.backward()
    optimizer.step()
    follow(optimizer.average, model)
