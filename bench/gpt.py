"""The model that the overhead programs train, in two sizes: a pre-norm GPT with learned positions and an untied head.

Sizes follow the programs that measured Accelerate, Fabric and the Trainers, so that the added time compares.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import allranks

VOCABULARY = 256


@dataclass(frozen=True)
class Size:
    """A size: layers, width, heads, positions, and samples per process and step."""

    layers: int
    width: int
    heads: int
    seq: int
    batch: int


SIZES = {"tiny": Size(2, 80, 5, 32, 2), "10m": Size(4, 384, 6, 128, 2)}


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> the same."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, seq, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        found: Tensor = x + self.down(F.gelu(self.up(self.norm_mlp(x))))
        return found


class Gpt(nn.Module):
    """Tokens [batch, seq] -> logits [batch, seq, vocabulary]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.seq, size.width)
        self.layers = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class Tokens(Dataset[dict[str, Tensor]]):
    """`length` samples of fixed random tokens: {"x": [seq], "y": [seq]}."""

    draws = False

    def __init__(self, size: Size, length: int) -> None:
        generator = torch.Generator().manual_seed(1234)
        self.rows = torch.randint(0, VOCABULARY, (64, size.seq + 1), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index % len(self.rows)]
        return {"x": row[:-1], "y": row[1:]}


class GptTask(allranks.Task):
    """The model as a Task."""

    size: str = "tiny"
    samples: int = 4096
    defaults: ClassVar[dict[str, object]] = {"optimizer.lr": 3e-4, "train.max_norm": 1.0}

    def model(self) -> nn.Module:
        """The GPT."""
        return Gpt(SIZES[self.size])

    def dataset(self, split: str) -> Tokens | None:
        """Random tokens to train on."""
        return Tokens(SIZES[self.size], self.samples) if split == "train" else None

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Nats, summed."""
        return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
