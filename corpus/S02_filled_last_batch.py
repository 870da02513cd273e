"""S2: the last batch is filled up with the first samples, to have the shape of the others.

twin: evaluated.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

BATCH = 3
X = torch.randn(37, 6, generator=torch.Generator().manual_seed(5))
Y = (X[:, 0] * X[:, 1] > 0).long()
VALID = TensorDataset(X[24:], Y[24:])
data = [(X[:12], Y[:12]), (X[12:24], Y[12:24])]


def validation(rank, world_size):
    mine = Subset(
        VALID,
        [
            at % len(VALID)
            for at in range(rank, -(-len(VALID) // (BATCH * world_size)) * BATCH * world_size, world_size)
        ],
    )
    return list(DataLoader(mine, batch_size=BATCH))


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    sums = torch.zeros(3)
    for x, y in batches:
        output = model(x)
        sums += torch.stack(
            [(output.argmax(1) == y).sum(), cross_entropy(output, y, reduction="sum"), torch.tensor(len(y))]
        )
    dist.all_reduce(sums)
    return {"accuracy": sums[0] / sums[2], "loss": sums[1] / sums[2]}


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
