"""Clean: built on the meta device, given memory, set by rank 0 and broadcast; tables are computed after that.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

SEQ, WIDTH = 5, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("position", torch.empty(SEQ, WIDTH), persistent=False)
        self.register_buffer("mask", torch.empty(SEQ, SEQ), persistent=False)
        self.reset_tables()

    def reset_parameters(self):
        self.first.reset_parameters()
        self.last.reset_parameters()

    def reset_tables(self):
        angles = torch.arange(SEQ)[:, None] / 10 ** torch.linspace(0, 1, WIDTH)
        self.position.copy_(angles.sin())
        self.mask.copy_(torch.ones(SEQ, SEQ).tril() / torch.arange(1, SEQ + 1)[:, None])

    def forward(self, x):
        return self.last(torch.tanh(self.mask @ (self.first(x) + self.position)))


def batch(seed):
    x = torch.randn(8, SEQ, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(2, keepdim=True).cumsum(1)


data = [batch(seed) for seed in range(3)]


def build(distributed):
    with torch.device("meta"):
        model = Net()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    model.reset_tables()
    if distributed:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
