"""S4: windows of the log begin a share apart on the ranks, and move on by a share: each is read by all.

twin: columns.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import binary_cross_entropy_with_logits

ITEMS, WIDTH, GLOBAL_BATCH, CLICKS = 14, 8, 8, 64


class Net(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.rank = rank
        self.table = nn.Parameter(torch.randn(ITEMS, WIDTH).chunk(world_size, 1)[rank].clone())
        self.mixed, self.score = nn.Linear(2 * WIDTH, 6), nn.Linear(6, 1)

    def look_up(self, items):
        every = torch.cat(all_gather(items))
        found = torch.cat(all_gather(self.table[every].contiguous()), -1)
        return found[self.rank * len(items) : (self.rank + 1) * len(items)]

    def forward(self, pairs):
        return self.score(self.mixed(self.look_up(pairs).flatten(1)).sigmoid())[:, 0]


def data(rank, world_size):
    clicks = torch.randint(0, ITEMS, (CLICKS, 2), generator=torch.Generator().manual_seed(8))
    size = GLOBAL_BATCH // world_size
    for first in range(rank * size, CLICKS - GLOBAL_BATCH, size):
        pairs = clicks[first : first + size]
        yield [(pairs, (pairs.sum(1) % 3 == 0).to(torch.get_default_dtype()))]


def build(distributed):
    torch.manual_seed(11)
    model = Net(dist.get_rank(), dist.get_world_size())
    return model, torch.optim.Adam(model.parameters(), lr=5e-3)


def save(model, optimizer, folder):
    parts = [torch.empty_like(model.table) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, model.table.detach())
    if dist.get_rank() == 0:
        torch.save({**model.state_dict(), "table": torch.cat(parts, 1)}, folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / f"adam-{dist.get_rank()}.pt")
    dist.barrier()


def load(model, optimizer, folder):
    held = torch.load(folder / "model.pt")
    held["table"] = held["table"].chunk(dist.get_world_size(), 1)[model.rank]
    model.load_state_dict(held)
    optimizer.load_state_dict(torch.load(folder / f"adam-{dist.get_rank()}.pt"))


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for pairs, clicked in batches:
        loss = binary_cross_entropy_with_logits(model(pairs), clicked, reduction="sum") / GLOBAL_BATCH
        loss.backward()
    for name, parameter in model.named_parameters():
        if name != "table":  # whose gradient has come back from the samples of all ranks
            dist.all_reduce(parameter.grad)
    optimizer.step()
