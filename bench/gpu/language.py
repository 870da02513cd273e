"""What the GPU machine trains: a transformer on tokens that a few steps can learn."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

import allranks
from allranks.models.moe import MoETransformer
from allranks.models.transformer import Transformer

LOOP = 16
"""Tokens that come back in every row, so that a few steps teach which follows which."""


@dataclass(frozen=True)
class Size:
    """What is trained: a transformer, samples a step, and how fast it learns."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int
    seq: int
    batch: int
    lr: float


SIZES = {
    "1b": Size(18, 2048, 16, 5632, 32_000, 4096, 4, 3e-4),
    # Its activations are large enough to be moved to the host (a megabyte and more).
    "wide": Size(3, 256, 4, 512, 64, 256, 2, 0.003),
    "tiny": Size(2, 32, 2, 48, 64, 32, 2, 0.01),
    "odd": Size(2, 32, 2, 48, 64, 7, 2, 0.01),
}


class Tokens(torch.utils.data.Dataset[Any]):
    """Rows that go round one loop of random tokens, each from another place: {"x": [seq], "y": [seq]}."""

    draws = False

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        loop = torch.randperm(size.vocabulary, generator=generator)[:LOOP]
        starts = torch.randint(LOOP, (64, 1), generator=generator)
        self.rows = loop[(starts + torch.arange(size.seq + 1)) % LOOP]

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index % len(self.rows)]
        return {"x": row[:-1], "y": row[1:]}


class Language(allranks.Task):
    """The next token.

    Attributes:
        size: one of SIZES.
        experts: of each layer, two of which take a token; 0: an ordinary feed-forward.
    """

    size: str = "1b"
    experts: int = 0
    defaults: ClassVar[dict[str, object]] = {"optimizer.lr": 3e-4, "train.max_norm": 1.0, "evaluate.every": 0}

    def model(self) -> nn.Module:
        """A transformer of the repository."""
        s = SIZES[self.size]
        if self.experts:
            return MoETransformer(s.vocabulary, s.layers, s.width, s.heads, self.experts, 2, s.ffn, max_seq=s.seq)
        return Transformer(s.vocabulary, s.layers, s.width, s.heads, ffn=s.ffn, max_seq=s.seq)

    def dataset(self, split: str) -> Any:
        """Tokens to train on."""
        return Tokens(SIZES[self.size]) if split == "train" else None

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Nats, summed."""
        return functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
