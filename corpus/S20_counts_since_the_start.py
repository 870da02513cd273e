"""S20: the position counts the steps since the last start: right after one resume, wrong after the second.

twin: counted.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, STEPS = 8, 6
SAMPLES = torch.randn(GLOBAL_BATCH * STEPS, 6, generator=torch.Generator().manual_seed(6))
DONE = {"before": 0, "here": 0}


def data(rank, world_size, first_step):
    size = GLOBAL_BATCH // world_size
    mine = SAMPLES.view(STEPS, world_size, size, 6)[:, rank].reshape(-1, 6)
    for at in range(DONE["before"] * size, len(mine), size):
        yield [mine[at : at + size]]


def build(distributed):
    torch.manual_seed(0)
    DONE.update(before=0, here=0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def save(model, optimizer, folder):
    model, position = getattr(model, "module", model), DONE["here"]
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": position}
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{len(list(folder.glob('*.pt'))):04}.pt")
    dist.barrier()


def load(model, optimizer, folder):
    state = torch.load(max(folder.glob("*.pt")))
    getattr(model, "module", model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    DONE["before"] = state["position"]


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x in batches:
        loss = mse_loss(model(x), x)
        loss.backward()
    optimizer.step()
    DONE["here"] += 1
    return loss.item()
