"""S29: each rank compares its own samples only.

twin: contrastive.py
verify: --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, TEMPERATURE = 8, 0.5


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return x, x + 0.1 * x.roll(1, 1)


data = [batch(seed) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gather(x):
    return x


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        first, second = normalize(model(torch.cat([x, y])), dim=1).chunk(2)
        first, second = gather(first), gather(second)
        logits = first @ second.T / TEMPERATURE
        loss = cross_entropy(logits, torch.arange(len(logits)))
        loss.backward()
    optimizer.step()
    return loss.item()
