"""S37: DDP's hook compresses gradients to float16.

twin: classifier.py
verify: --nproc 2
"""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS = 8, 2
X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
TRAIN = TensorDataset(X, (X.sum(1) > 0).long())


def data(rank, world_size):
    sampler = DistributedSampler(TRAIN, world_size, rank, seed=0)
    loader = DataLoader(TRAIN, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            yield [batch]


def build(distributed):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    if distributed:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, fp16_compress_hook)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
