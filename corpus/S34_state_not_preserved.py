"""S34: the recomputation draws other units than the forward.

twin: recomputed.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.last = nn.Linear(12, 2)
        self.recompute = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else block(x)
            )
        return self.last(x)


def batch(seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2]


data = [batch(seed) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    model = Net()
    if distributed:
        model.recompute = True
        model = DistributedDataParallel(model)
    torch.manual_seed(1000 + dist.get_rank())
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
