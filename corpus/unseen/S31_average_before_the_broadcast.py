"""S31: the average is copied before DDP broadcasts, and begins with what each rank has made itself.

twin: diffusion.py
verify: --nproc 2
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, silu
from torch.nn.parallel import DistributedDataParallel

WIDTH, GLOBAL_BATCH, EPOCHS, TIMES, KEEP = 5, 11, 4, 9, 0.8
SERIES = torch.randn(22, WIDTH, generator=torch.Generator().manual_seed(21)).cumsum(1)
STEPS_OF_AN_EPOCH = len(SERIES) // GLOBAL_BATCH
LEFT = torch.linspace(0.95, 0.05, TIMES)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inward = nn.Embedding(TIMES, 14), nn.Linear(WIDTH, 14)
        self.outward = nn.Sequential(nn.LayerNorm(14), nn.Linear(14, WIDTH))

    def forward(self, noisy, times):
        return self.outward(silu(self.inward(noisy) + self.time(times)))


def noised(samples, epoch):
    generators = [torch.Generator().manual_seed(1000 * epoch + int(sample)) for sample in samples]
    times = torch.cat([torch.randint(0, TIMES, (1,), generator=generator) for generator in generators])
    noise = torch.stack([torch.randn(WIDTH, generator=generator) for generator in generators])
    left = LEFT[times, None]
    return left.sqrt() * SERIES[samples] + (1 - left).sqrt() * noise, times, noise


def data(rank, world_size, first_step):
    done, skipped = divmod(first_step, STEPS_OF_AN_EPOCH)
    for epoch in range(done, EPOCHS):
        order = torch.randperm(len(SERIES), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH)[skipped:]:
            yield [noised(batch.tensor_split(world_size)[rank], epoch)]
        skipped = 0


def bare(model):
    return getattr(model, "module", model)


@torch.no_grad()
def follow(average, model, keep):
    for kept, value in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(value, 1 - keep)


def build(distributed):
    model = Denoiser()
    average = deepcopy(model).requires_grad_(False)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer.average = average
    return model, optimizer


def state(model, optimizer):
    return optimizer.average.state_dict()


def save(model, optimizer, folder):
    held = {
        "model": bare(model).state_dict(),
        "average": optimizer.average.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    if dist.get_rank() == 0:
        torch.save(held, folder / "last.pt")
    dist.barrier()


def load(model, optimizer, folder):
    held = torch.load(folder / "last.pt")
    bare(model).load_state_dict(held["model"], strict=False)  # files of older versions hold the table of times too
    optimizer.average.load_state_dict(held["average"])
    optimizer.load_state_dict(held["optimizer"])


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for noisy, times, noise in batches:
        number = torch.tensor(len(noisy))
        dist.all_reduce(number)
        loss = mse_loss(model(noisy, times), noise, reduction="sum") / (WIDTH * number)
        (dist.get_world_size() * loss).backward()
    optimizer.step()
    follow(optimizer.average, bare(model), KEEP)
    logged = loss.detach().clone()
    dist.all_reduce(logged)
    return logged.item()
