"""S1: a sampler is made anew for every epoch, and begins with epoch 0 again.

twin: augmented.py
verify: --nproc 2
"""

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 8
IMAGES = np.random.default_rng(3).normal(size=(16, 6))


class Augmented(Dataset):
    epoch = 0

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        noise = np.random.default_rng((self.epoch, index)).normal(size=6)
        return torch.tensor(IMAGES[index] + 0.1 * noise), torch.tensor(IMAGES[index][:2])


def data(rank, world_size):
    dataset = Augmented()
    sampler = DistributedSampler(dataset, world_size, rank, seed=0)
    for epoch in range(2):
        dataset.epoch = epoch
        sampler = DistributedSampler(dataset, world_size, rank, seed=0)
        for batch in DataLoader(dataset, batch_size=GLOBAL_BATCH // world_size, sampler=sampler):
            yield [batch]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
