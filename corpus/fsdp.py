"""Clean: a small transformer with rotary positions under FSDP2, clipped by the whole model's norm.

verify: --nproc 2
verify: --nproc 4
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WORDS, WIDTH, SEQ, MAX_NORM = 12, 16, 5, 0.5


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rotary = nn.LayerNorm(WIDTH), Rotary()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(seed):
    words = torch.randint(0, WORDS, (8, SEQ), generator=torch.Generator().manual_seed(seed))
    return words, words.cumsum(1) % WORDS


data = [batch(seed) for seed in range(4)]


def build(distributed):
    torch.manual_seed(0)
    model = Net()
    if distributed:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batches):
    optimizer.zero_grad()
    for words, targets in batches:
        loss = cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    return loss.item()
