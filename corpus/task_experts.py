"""Clean: a Task with a mixture of experts, cut over ranks and not.

verify: --layout dp_replicate=2,ep=2
verify: --layout ddp --nproc 2
"""

import torch
from torch import nn

import allranks
from allranks.models.moe import MoETransformer

WORDS, SEQ = 13, 8


class Mixed(allranks.Task):
    defaults = {"train.global_batch": 8}

    def dataset(self, split):
        words = torch.randint(0, WORDS, (33, SEQ), generator=torch.Generator().manual_seed(len(split)))
        return [{"x": row, "y": row.roll(-1)} for row in words]

    def model(self):
        return MoETransformer(WORDS, 2, 16, 2, num_experts=4, top_k=2, ffn=8, max_seq=SEQ)

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
