"""S14: the head gets a parameter of its own on the way into DDP.

twin: tied.py
verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH = 12, 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(torch.tanh(self.inner(self.embedding(words))))


def batch(seed):
    words = torch.randint(0, WORDS, (8, 5), generator=torch.Generator().manual_seed(seed))
    return words, words.roll(-1, 1)


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = Net()
    if distributed:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        model = DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(model, optimizer, folder):
    if dist.get_rank() == 0:
        torch.save(getattr(model, "module", model).state_dict(), folder / "model.pt")
    dist.barrier()


def load(model, optimizer, folder):
    getattr(model, "module", model).load_state_dict(torch.load(folder / "model.pt"))


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for words, targets in batches:
        loss = cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
    optimizer.step()
    return loss.item()
