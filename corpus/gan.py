"""Clean: two models under DDP that train against each other, with an optimizer each.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    models = {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        "critic": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
    }
    if distributed:
        models = {name: DistributedDataParallel(model) for name, model in models.items()}
        torch.manual_seed(1 + dist.get_rank())
    return models, {name: torch.optim.Adam(model.parameters(), lr=1e-2) for name, model in models.items()}


def step(models, optimizers, batches):
    for real in batches:
        drawn = models["generator"](torch.randn(len(real), 4))
        optimizers["critic"].zero_grad()
        (softplus(-models["critic"](real)).mean() + softplus(models["critic"](drawn.detach())).mean()).backward()
        optimizers["critic"].step()
        optimizers["generator"].zero_grad()
        loss = softplus(-models["critic"](drawn)).mean()
        loss.backward()
        optimizers["generator"].step()
    return loss.item()
