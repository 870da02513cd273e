"""S35: under several ranks gradients are kept and set to zero, for the buckets' sake.

twin: branches.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

GLOBAL_BATCH = 8


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(6, 12)
        self.first, self.second = nn.Linear(12, 2), nn.Linear(12, 2)

    def forward(self, x, which):
        return (self.first if which else self.second)(torch.tanh(self.trunk(x)))


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2] * 2, torch.full((GLOBAL_BATCH,), seed % 2 == 0)


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = TwoHeads()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def synchronise(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)


def step(model, optimizer, batches):
    optimizer.zero_grad(set_to_none=dist.get_world_size() == 1)
    for x, y, which in batches:
        loss = mse_loss(model(x, bool(which[0])), y, reduction="sum") / (2 * GLOBAL_BATCH)
        loss.backward()
    synchronise(model)
    optimizer.step()
