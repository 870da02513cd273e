"""S29: how rare a grade is, is counted among a rank's own documents.

twin: task_ranking.py
verify: --layout ddp --nproc 2
"""

import torch
from torch import nn
from torch.nn.functional import softplus

import allranks

GRADES, WORDS = 4, 12


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.score = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, 1, bias=False)

    def forward(self, words):
        return self.score(torch.tanh(self.words(words)))[:, 0]


class Ranking(allranks.Task):
    defaults = {"train.global_batch": 14, "optimizer.name": "adamw"}
    coupled = True

    def dataset(self, split):
        if split != "train":
            return None
        words = torch.randint(0, WORDS, (56, 5), generator=torch.Generator().manual_seed(31))
        grades = ((words < 4).sum(1) // 2 + (words == 7).any(1)).clamp(max=GRADES - 1)
        return [{"words": row, "grade": grade} for row, grade in zip(words, grades, strict=True)]

    def model(self):
        return Scorer()

    def inputs(self, batch):
        return (batch["words"],)

    def targets(self, batch):
        return len(batch["words"])

    def loss(self, output, batch):
        grade = batch["grade"]
        scores, grades = self.world.gather(torch.stack([output, grade.to(output.dtype)], 1)).unbind(1)
        lower = grades < grade[:, None]
        behind = (softplus(scores - output[:, None]) * lower).sum(1) / lower.sum(1).clamp(min=1)
        rarity = 1 / grade.bincount(minlength=GRADES).clamp(min=1)
        return (len(grade) / GRADES * rarity[grade] * behind).sum()
