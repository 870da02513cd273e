"""Clean: a classifier under FSDP2, fed by DistributedSampler over several epochs.

verify: --nproc 2
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    if distributed:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
