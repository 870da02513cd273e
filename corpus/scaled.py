"""Clean: loss scaling where gradients are added up before they are looked at, so that all ranks skip the same steps.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

GLOBAL_BATCH = 8


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(seed))
    x[-1] = float("inf") if seed == 1 else x[-1]  # a broken record in the second step
    return x, x[:, :2].nan_to_num(posinf=1.0)


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return model, optimizer


def synchronise(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y, reduction="sum") / (2 * GLOBAL_BATCH)
        optimizer.scaler.scale(loss).backward()
    synchronise(model)
    optimizer.scaler.unscale_(optimizer)
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()
