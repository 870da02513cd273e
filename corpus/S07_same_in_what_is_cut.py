"""S7: both tp ranks drop the same units of a layer of which each has a half.

twin: tensor_parallel.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy, dropout, silu

TP, WORDS, WIDTH, FFN, SEQ, GLOBAL_BATCH = 2, 11, 6, 8, 4, 8


def part(size, tp, number):
    """Rows of a dim of `size` that rank `number` of `tp` holds; the last may hold fewer."""
    each = -(-size // tp)
    return slice(number * each, min(size, (number + 1) * each))


class Net(nn.Module):
    def __init__(self, tp=1, number=0, group=None):
        super().__init__()
        self.tp, self.number, self.group = tp, number, group
        self.embedding = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Parameter(torch.randn(FFN, WIDTH)), nn.Parameter(torch.randn(FFN, WIDTH))
        self.down, self.head = nn.Parameter(torch.randn(WIDTH, FFN)), nn.Linear(WIDTH, WORDS)
        mine = part(FFN, tp, number)
        for name, place in self.places(mine).items():
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[place].clone()))

    def places(self, mine):
        return {"embedding": part(WORDS, self.tp, self.number), "gate": mine, "up": mine, "down": (slice(None), mine)}

    def look_up(self, words):
        rows = part(WORDS, self.tp, self.number)
        held = (words >= rows.start) & (words < rows.stop)
        found = self.embedding[(words - rows.start).clamp(0, len(self.embedding) - 1)] * held[..., None]
        return self.sum(found)

    def sum(self, x):
        return x if self.tp == 1 else all_reduce(x, group=self.group)

    def forward(self, words):
        x = self.look_up(words)
        mine = part(SEQ, self.tp, self.number)
        normed = torch.zeros_like(x)
        normed[:, mine] = self.norm(x[:, mine])
        normed = self.sum(normed)
        with torch.random.fork_rng():
            torch.manual_seed(torch.initial_seed() + 1)
            hidden = dropout(silu(normed @ self.gate.T) * (normed @ self.up.T), 0.1, self.training)
        out = self.sum(hidden @ self.down.T)
        return self.head(x + dropout(out, 0.1, self.training))


def batch(seed):
    words = torch.randint(0, WORDS, (GLOBAL_BATCH, SEQ), generator=torch.Generator().manual_seed(seed))
    return words, words.cumsum(1) % WORDS


def data(rank, world_size):
    tp = min(TP, world_size)
    for seed in range(4):
        words, targets = batch(seed)
        count, number = world_size // tp, rank // tp
        yield [(words.chunk(count)[number], targets.chunk(count)[number])]


def build(distributed):
    torch.manual_seed(0)
    if not distributed:
        model = Net()
        model.data_group = None
    else:
        rank, size = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(range(first, first + TP)) for first in range(0, size, TP)]
        across = [dist.new_group(range(first, size, TP)) for first in range(TP)]
        model = Net(TP, rank % TP, groups[rank // TP])
        model.data_group = across[rank % TP]
    torch.manual_seed(100 * (dist.get_rank() // TP) + 7)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def synchronise(model):
    if model.tp == 1:
        return
    data_ranks = dist.get_world_size() // model.tp
    for name, parameter in model.named_parameters():
        # Every tp rank has computed the whole loss, and what is summed over tp comes back from each of them.
        parameter.grad /= model.tp
        if name.startswith(("norm", "head")):
            dist.all_reduce(parameter.grad, group=model.group)
        dist.all_reduce(parameter.grad, group=model.data_group)
        parameter.grad /= data_ranks


def save(model, optimizer, folder):
    whole = {}
    for name, value in model.state_dict().items():
        if model.tp > 1 and name in model.places(None):
            parts = [None] * model.tp
            dist.all_gather_object(parts, value, group=model.group)
            value = torch.cat(parts, 1 if name == "down" else 0)
        whole[name] = value
    if dist.get_rank() == 0:
        torch.save(whole, folder / "model.pt")
    torch.save(torch.get_rng_state(), folder / f"generator-{dist.get_rank()}.pt")
    dist.barrier()


def load(model, optimizer, folder):
    whole = torch.load(folder / "model.pt")
    for name, place in model.places(part(FFN, model.tp, model.number)).items():
        whole[name] = whole[name][place]
    model.load_state_dict(whole)
    torch.set_rng_state(torch.load(folder / f"generator-{dist.get_rank()}.pt"))


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for words, targets in batches:
        loss = cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
    synchronise(model)
    optimizer.step()
    return loss.item()
