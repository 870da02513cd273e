"""S16: every rank adds the balance loss of the whole world.

twin: experts.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather, all_reduce
from torch.nn.functional import mse_loss

GLOBAL_BATCH, WIDTH, EXPERTS = 8, 6, 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in range(EXPERTS)})

    def keep(self, rank, world_size):
        for number in range(EXPERTS):
            if number % world_size != rank:
                del self.experts[str(number)]

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        self.balance = EXPERTS * (torch.cat(all_gather(weights)).mean(0) ** 2).sum()
        every, weights = torch.cat(all_gather(x)), torch.cat(all_gather(weights))
        mixed = sum(weights[:, int(number), None] * expert(every) for number, expert in self.experts.items())
        mine = slice(dist.get_rank() * len(x), (dist.get_rank() + 1) * len(x))
        return x + all_reduce(mixed)[mine]


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x, x.roll(1, 1)


data = [batch(seed) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts())
    if distributed:
        model[1].keep(dist.get_rank(), dist.get_world_size())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def synchronise(model):
    for name, parameter in model.named_parameters():
        if "experts." not in name:  # an expert has seen the tokens of all ranks
            dist.all_reduce(parameter.grad)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y, reduction="sum") / GLOBAL_BATCH
        # Every rank has the same balance; its gradient comes back from all of them.
        (loss + 0.1 * model[1].balance).backward()
    synchronise(model)
    optimizer.step()
