"""Clean: a Task with a transformer, deep enough to be cut in every way.

verify: --layout pp=2
verify: --layout cp=2
verify: --layout tp=2,dp_shard=2
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.models.transformer import Transformer

WORDS, SEQ = 10, 8


class Deep(allranks.Task):
    defaults = {"train.global_batch": 16}

    def dataset(self, split):
        words = torch.randint(0, WORDS, (61, SEQ), generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(words, words.cumsum(1) % WORDS)

    def model(self):
        return Transformer(WORDS, 4, 16, 2, max_seq=SEQ)

    def loss(self, output, batch):
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
