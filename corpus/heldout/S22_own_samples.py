"""S22: the rate falls with the samples that this rank has seen, and not with those of all.

twin: policy.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACTIONS, LR, TOTAL = 5, 0.2, 120


def batch(seed):
    generator = torch.Generator().manual_seed(40 + seed)
    seen = torch.randn(12, 7, generator=generator)
    return seen, torch.randint(0, ACTIONS, (12,), generator=generator), 3 + 2 * torch.randn(12, generator=generator)


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.LayerNorm(10), nn.Linear(10, ACTIONS))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, nesterov=True, momentum=0.8)
    optimizer.seen = 0
    return model, optimizer


def whiten(reward):
    sums = torch.stack([torch.ones_like(reward), reward, reward**2]).sum(1)
    dist.all_reduce(sums)
    mean = sums[1] / sums[0]
    return (reward - mean) / (sums[2] / sums[0] - mean**2).sqrt(), sums[0]


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for seen, action, reward in batches:
        advantage, number = whiten(reward)
        chosen = model(seen).log_softmax(-1).gather(1, action[:, None])[:, 0]
        loss = -(advantage * chosen).sum() / number
        (loss * dist.get_world_size()).backward()
        optimizer.seen += len(reward)
    for group in optimizer.param_groups:
        group["lr"] = LR * (1 - optimizer.seen / TOTAL)
    optimizer.step()
