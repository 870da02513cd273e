"""Clean: a forward that autocasts to bfloat16 under FSDP2, and keeps float32 parameters.

verify: --nproc 2
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss


def batch(seed):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2]


data = [batch(seed) for seed in range(3)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 2))
    if distributed:
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        loss = mse_loss(output, y)
        loss.backward()
    optimizer.step()
    return loss.item()
