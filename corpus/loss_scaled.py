"""Clean: torch's loss scaling under DDP; a resume brings the scaler back, too.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, STEPS = 8, 6
SAMPLES = torch.randn(GLOBAL_BATCH * STEPS, 6, generator=torch.Generator().manual_seed(6))
data = list(SAMPLES.split(GLOBAL_BATCH))


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    return model, optimizer


def parts(model, optimizer):
    return {"model": getattr(model, "module", model), "optimizer": optimizer, "scaler": optimizer.scaler}


def save(model, optimizer, folder):
    if dist.get_rank() == 0:
        torch.save({name: part.state_dict() for name, part in parts(model, optimizer).items()}, folder / "state.pt")
    dist.barrier()


def load(model, optimizer, folder):
    state = torch.load(folder / "state.pt")
    for name, part in parts(model, optimizer).items():
        part.load_state_dict(state[name])


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x in batches:
        loss = mse_loss(model(x), x)
        optimizer.scaler.scale(loss).backward()
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()
    return loss.item()
