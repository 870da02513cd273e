"""S16: every rank adds the bias to its heads' part, and the sum has it once a rank.

twin: heads.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss, scaled_dot_product_attention

HEADS, SIZE, WIDTH, TIMES = 12, 2, 8, 6
CUT = {"query": 0, "key": 0, "value": 0, "out": 1}


class Copied(torch.autograd.Function):
    """The same on all ranks; its gradient is the sum of what the heads of each rank say."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Added(torch.autograd.Function):
    """The sum of what the ranks have; each part gets the whole gradient, which all ranks have."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Attention(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        for name, dim in CUT.items():
            whole = torch.randn((HEADS * SIZE, WIDTH) if dim == 0 else (WIDTH, HEADS * SIZE)) / 3
            setattr(self, name, nn.Parameter(whole.chunk(world_size, dim)[rank].clone()))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        seen = Copied.apply(self.norm(x))
        split = [linear(seen, w).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in (self.query, self.key, self.value)]
        mixed = scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).flatten(2)
        return x + Added.apply(linear(mixed, self.out, self.bias))


class Lamb(torch.optim.Optimizer):
    def __init__(self, groups, lr, decay=0.05):
        super().__init__(groups, {"lr": lr, "decay": decay, "cut": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for value in group["params"]:
                held = self.state[value]
                if not held:
                    held.update(step=0, first=torch.zeros_like(value), second=torch.zeros_like(value))
                held["step"] += 1
                held["first"].lerp_(value.grad, 0.1)
                held["second"].lerp_(value.grad**2, 0.01)
                spread = (held["second"] / (1 - 0.99 ** held["step"])).sqrt() + 1e-3
                change = held["first"] / (1 - 0.9 ** held["step"]) / spread + group["decay"] * value
                squares = torch.stack([(value**2).sum(), (change**2).sum()])
                if group["cut"]:
                    dist.all_reduce(squares)
                trust = (squares[0] / squares[1]).sqrt() if squares[0] > 0 else 1.0
                value.sub_(group["lr"] * trust * change)


def data(rank, world_size):
    for seed in range(4):
        x = torch.randn(5, TIMES, WIDTH, generator=torch.Generator().manual_seed(80 + seed))
        yield [(x, x.cumsum(1).tanh() + 0.5)]


def build(distributed):
    torch.manual_seed(23)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(dist.get_rank(), dist.get_world_size()), nn.ReLU())
    model.append(nn.Linear(WIDTH, WIDTH))
    cut = [getattr(model[1], name) for name in CUT]
    rest = [value for value in model.parameters() if all(value is not other for other in cut)]
    return model, Lamb([{"params": cut, "cut": True}, {"params": rest}], lr=0.02)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for x, y in batches:
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
    return loss.item()
