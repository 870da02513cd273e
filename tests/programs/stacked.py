"""A user's Task file: a small transformer on sums of digits, deep enough for a pipeline."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.models.transformer import Transformer


class Stacked(allranks.Task):
    """Learn running sums modulo ten."""

    num_layers: int = 4
    num_samples: int = 61
    outside: bool = False

    def dataset(self, split: str) -> TensorDataset:
        """Digits [8], and their running sums modulo 10."""
        digits = torch.randint(0, 10, (self.num_samples, 8), generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(digits, digits.cumsum(1) % 10)

    def model(self) -> nn.Module:
        """A transformer; `outside`: one that keeps something beside its blocks, which no stage hands on."""
        model = Transformer(10, self.num_layers, 16, 2, max_seq=8)
        return Outside(model) if self.outside else model

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy."""
        return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")

    def metrics(self, output: torch.Tensor, batch: Any) -> dict[str, tuple[Any, Any]]:
        """Accuracy."""
        return {"accuracy": ((output.argmax(-1) == batch[1]).sum(), batch[1].numel())}


class Outside(nn.Module):
    """Adds the embedding to the output of each layer, outside of the layers."""

    def __init__(self, inner: Transformer) -> None:
        super().__init__()
        self.embedding, self.layers, self.output = inner.embedding, inner.layers, inner.output

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, seq] -> logits."""
        first = value = self.embedding(tokens)
        for layer in self.layers:
            value = layer(value) + first
        logits: torch.Tensor = self.output(value)
        return logits
