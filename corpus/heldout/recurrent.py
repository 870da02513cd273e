"""Clean: a recurrent language model under DDP with noise from a generator of its own; perplexity from sums of all.

verify: --nproc 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, NOISE = 13, 7, 0.05


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)
        self.noise = torch.Generator()

    def forward(self, words):
        x = self.embedding(words)
        if self.training:
            x = x + NOISE * torch.randn(x.shape, generator=self.noise)
        return self.head(self.inner(x)[0])


def lines(seed, number):
    words = torch.randint(0, WORDS, (number, 6), generator=torch.Generator().manual_seed(seed))
    return words, (words.roll(-1, 1) + words) % WORDS


data = [lines(seed, 8) for seed in range(4)]
UNSEEN = lines(70, 11)


def validation(rank, world_size):
    return [(words, targets) for words, targets in zip(*UNSEEN, strict=True)][rank::world_size]


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    sums = torch.zeros(2)
    for words, targets in batches:
        sums += torch.stack([cross_entropy(model(words[None])[0], targets, reduction="sum"), torch.tensor(6.0)])
    dist.all_reduce(sums)
    return {"perplexity": (sums[0] / sums[1]).exp()}


def build(distributed):
    torch.manual_seed(9)
    model = Net()
    model.noise.manual_seed(50 + dist.get_rank())
    if distributed:
        model = DistributedDataParallel(model)
    return model, torch.optim.NAdam(model.parameters(), lr=4e-3)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for words, targets in batches:
        loss = cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()
    return loss.item()
