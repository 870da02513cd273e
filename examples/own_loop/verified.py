"""The loop of train.py as `allranks verify` takes it, beside plain torch on one device.

allranks verify examples/own_loop/verified.py --nproc 2
allranks verify examples/own_loop/verified.py --nproc 4
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import allranks
from allranks.data import Sampler

GLOBAL_BATCH = 7  # which no number of processes shares evenly
LAYOUTS = {2: "ddp", 4: "dp_replicate=2,dp_shard=2"}

points = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
samples = TensorDataset(points.double(), (points[:, 0] * points[:, 1] + points[:, 2] > 0).long())
folder = tempfile.TemporaryDirectory()
world = None


def build(distributed):
    global world  # noqa: PLW0603
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    if not distributed:
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout = LAYOUTS.get(dist.get_world_size(), "fsdp")
    world = allranks.join(layout=layout, seed=0, precision="float64", run=folder.name)
    model = world.parallelize(model)
    return model, world.optimizer(model, torch.optim.AdamW, lr=1e-2)


def data(rank, world_size):
    if world is not None:
        stream = world.stream(samples, global_batch=GLOBAL_BATCH, seed=0)
    else:  # the same order, from a sampler
        order = Sampler(samples, world_size, rank, seed=0)
        stream = DataLoader(samples, batch_size=GLOBAL_BATCH, sampler=order)
    for batch in stream:
        yield [batch]


def step(model, optimizer, batches):
    ((points, sides),) = batches
    loss = cross_entropy(model(points), sides, reduction="sum")
    if world is None:
        optimizer.zero_grad()
        (loss / len(sides)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        world.backward(loss, targets=len(sides))
        world.step(optimizer, max_norm=1.0)
    total = torch.stack([loss.detach(), torch.tensor(float(len(sides)))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()
