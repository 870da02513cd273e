"""Your own text, byte by byte: allranks train examples/text/task.py data.text='notes/**/*.md'"""

import math

from torch import nn

import allranks
from allranks.data.sources import ByteWindows, text_files
from allranks.models.transformer import Transformer


class Notes(allranks.Task):
    text: str = "**/*.md"  # a glob; data.text on the command line sets it
    seq: int = 128
    defaults = {"train.steps": 300, "train.global_batch": 16, "optimizer.lr": 3e-3, "schedule.name": "linear"}

    def dataset(self, split):  # windows of bytes, {"x": [seq], "y": [seq]}; the two splits share no byte
        return ByteWindows(text_files(self.text), split=split, seq=self.seq)

    def model(self):
        return Transformer(vocab_size=256, num_layers=2, hidden=128, num_heads=4, max_seq=self.seq)

    def loss(self, output, batch):  # the SUM over all bytes of the batch
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")

    def metrics(self, output, batch):
        return {"bits_per_byte": (self.loss(output, batch) / math.log(2), batch["y"].numel())}
