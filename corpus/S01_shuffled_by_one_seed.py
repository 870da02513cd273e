"""S1: the list of samples is shuffled by a generator that every epoch makes anew, with the same seed.

twin: shuffled.py
verify: --nproc 2
"""

import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, EPOCHS, TRAIN = 8, 3, 24
X = torch.randn(30, 6, generator=torch.Generator().manual_seed(31))
Y = (X[:, 0] > X[:, 1]).long()


def split():
    return torch.randperm(len(X), generator=torch.Generator().manual_seed(7)).tolist()


def data(rank, world_size):
    for epoch in range(EPOCHS):
        indices = split()[:TRAIN]
        random.Random(0).shuffle(indices)
        for start in range(0, TRAIN, GLOBAL_BATCH):
            mine = indices[start : start + GLOBAL_BATCH][rank::world_size]
            yield [(X[mine], Y[mine])]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
