"""Clean: DDP with dropout, Adam and a schedule; a resume brings back all of it, generators and position too.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, STEPS = 8, 6
SAMPLES = torch.randn(GLOBAL_BATCH * STEPS, 6, generator=torch.Generator().manual_seed(6))


def data(rank, world_size, first_step):
    size = GLOBAL_BATCH // world_size
    mine = SAMPLES.view(STEPS, world_size, size, 6)[:, rank].reshape(-1, 6)
    for at in range(first_step * size, len(mine), size):
        yield [mine[at : at + size]]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 6))
    if distributed:
        model = DistributedDataParallel(model)
    torch.manual_seed(100 + dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer


def save(model, optimizer, folder):
    model = getattr(model, "module", model)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": optimizer.schedule.state_dict(),
    }
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    torch.save(torch.get_rng_state(), folder / f"generator-{dist.get_rank()}.pt")
    dist.barrier()


def load(model, optimizer, folder):
    model = getattr(model, "module", model)
    state = torch.load(folder / "state.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    optimizer.schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(torch.load(folder / f"generator-{dist.get_rank()}.pt"))


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x in batches:
        loss = mse_loss(model(x), x)
        loss.backward()
    optimizer.step()
    optimizer.schedule.step()
    return loss.item()
