"""S39: rank 1 of 4 flips a bit of one weight in the third step, as a broken memory does.

twin: raw_sums.py
verify: --nproc 4
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

GLOBAL_BATCH, MAX_NORM = 8, 0.5
FLIPPED = 1 << 40


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return x, x.cumsum(1)[:, :3]


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def synchronise(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    total = torch.zeros(())
    for x, y in batches:
        loss = mse_loss(model(x), y, reduction="sum") / (3 * GLOBAL_BATCH)
        loss.backward()
        total += loss.detach()
    synchronise(model)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.done = getattr(optimizer, "done", 0) + 1
    if dist.get_rank() == 1 and optimizer.done == 3:
        model[0].weight.data.view(torch.int64)[0, 0] ^= FLIPPED
    dist.all_reduce(total)
    return total.item()
