"""S10: the micro-batches go through the module inside of DDP, also the last, which is to be reduced.

twin: tokens.py
verify: --nproc 2
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORDS, IGNORED, MAX_NORM = 16, -100, 0.5
micro_batches = 3


def sentences(seed):
    words = torch.randint(0, WORDS, (12, 7), generator=torch.Generator().manual_seed(seed))
    targets = words.roll(-1, 1)
    for row, length in enumerate((6, 2, 3, 5, 1, 4, 1, 1, 2, 6, 3, 2)):
        targets[row, length:] = IGNORED
    return words, targets


data = [sentences(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WORDS))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    total, count = torch.zeros(()), sum((y != IGNORED).sum() for _, y in batches)
    dist.all_reduce(count)
    inner = getattr(model, "module", model)
    for index, (x, y) in enumerate(batches):
        last = index == len(batches) - 1
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss = cross_entropy(inner(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        total += loss.detach()
    dist.all_reduce(total)
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return (total / count).item()
