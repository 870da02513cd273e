"""S9: loss() returns the mean, and not the sum, over the words that count.

twin: task_text.py
verify: --layout ddp --nproc 2
refused: returns a mean over targets
"""

import torch
from torch import nn

import allranks

WORDS, IGNORED = 11, -100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        return self.head(x + torch.tanh(self.inner(self.norm(x))))


class Text(allranks.Task):
    defaults = {"train.global_batch": 12, "train.ema": 0.9}

    def dataset(self, split):
        words = torch.randint(0, WORDS, (31, 7), generator=torch.Generator().manual_seed(len(split)))
        targets = words.roll(-1, 1)
        for row in range(len(words)):
            targets[row, 1 + row * 5 % 7 :] = IGNORED
        return [{"words": w, "labels": t} for w, t in zip(words, targets, strict=True)]

    def model(self):
        return Net()

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def metrics(self, output, batch):
        counted = batch["labels"] != IGNORED
        return {"accuracy": (((output.argmax(-1) == batch["labels"]) & counted).sum(), counted.sum())}
