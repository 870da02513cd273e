"""S28: each rank looks at its own loss, and leaves out steps that the others make.

twin: lookahead.py
verify: --nproc 2
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import elu, mse_loss
from torch.nn.parallel import DistributedDataParallel

WIDTH, CODE, LEAP = 7, 3, 2.5
micro_batches = 2


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.mean, self.spread = nn.Linear(WIDTH, 12), nn.Linear(12, CODE), nn.Linear(12, CODE)
        self.outward = nn.Sequential(nn.Linear(CODE, 12), nn.ELU(), nn.Linear(12, WIDTH))

    def forward(self, x, noise):
        hidden = elu(self.inward(x))
        mean, spread = self.mean(hidden), self.spread(hidden)
        return self.outward(mean + noise * spread.exp()), mean, spread


class Lookahead(torch.optim.Optimizer):
    """Momentum; after every other step it goes back half of the way to where it was after the last of these."""

    def __init__(self, parameters, lr, momentum=0.8):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "limit": float("inf")})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                held = self.state[value]
                if not held:
                    held.update(step=0, slow=value.clone(), velocity=torch.zeros_like(value))
                held["step"] += 1
                held["velocity"].mul_(group["momentum"]).add_(value.grad)
                value.sub_(group["lr"] * held["velocity"])
                if held["step"] % 2 == 0:
                    value.copy_(held["slow"].lerp_(value, 0.5))


def batch(seed):
    generator = torch.Generator().manual_seed(90 + seed)
    x = torch.randn(13, WIDTH, generator=generator)
    if seed == 1:
        x[9:] *= 6  # as a broken record of some sensor would be
    return x, torch.randn(13, CODE, generator=generator)


data = [batch(seed) for seed in range(5)]


def build(distributed):
    torch.manual_seed(29)
    model = Vae()
    if distributed:
        model = DistributedDataParallel(model)
    return model, Lookahead(model.parameters(), lr=0.02)


def save(model, optimizer, folder):
    if dist.get_rank() == 0:
        held = {"model": getattr(model, "module", model).state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, folder / "vae.pt")
    dist.barrier()


def load(model, optimizer, folder):
    held = torch.load(folder / "vae.pt")
    getattr(model, "module", model).load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])


def step(model, optimizer, batches):
    optimizer.zero_grad()
    number, loss = torch.tensor(sum(len(x) for x, _ in batches)), torch.zeros(())
    dist.all_reduce(number)
    for index, (x, noise) in enumerate(batches):
        waits = index < len(batches) - 1 and hasattr(model, "no_sync")
        with model.no_sync() if waits else nullcontext():
            again, mean, spread = model(x, noise)
            apart = 0.5 * (mean**2 + (2 * spread).exp() - 2 * spread - 1).sum()
            part = (mse_loss(again, x, reduction="sum") + 0.1 * apart) / number
            (part * dist.get_world_size()).backward()
        loss += part.detach()
    for group in optimizer.param_groups:
        leaps, group["limit"] = loss.item() > group["limit"], LEAP * loss.item()
    if not leaps:
        optimizer.step()
    dist.all_reduce(loss)
    return loss.item()
