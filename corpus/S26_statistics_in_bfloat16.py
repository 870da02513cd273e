"""S26: the ranks' buffers are cast with the rest of a low-precision wrapper.

twin: batch_norm.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH, WIDTH = 8, 12


class WorldBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        count = len(x) * dist.get_world_size()
        mean = all_reduce(x.sum(0)) / count
        variance = all_reduce(((x - mean) ** 2).sum(0)) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def batch(seed):
    x = torch.randn(GLOBAL_BATCH, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :2] ** 2


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, WIDTH), WorldBatchNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    if distributed:
        model[1].running_mean = model[1].running_mean.bfloat16()
        model[1].running_var = model[1].running_var.bfloat16()
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
