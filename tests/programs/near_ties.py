"""A mixture of experts whose router cannot tell experts of a pair apart but by rounding.

Where several processes run, a product is added up in pieces, as tensor parallelism or another kernel does it: right,
but rounded otherwise. In float64 that moves no choice; in a low precision it does.
"""

import functools
import operator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.parallel.spread import Spread
from allranks.stepping import passes

WORDS, WIDTH, EXPERTS = 24, 64, 4
GAP = 1e-5  # float64 tells it, bfloat16 and float16 do not
PIECES = 16


class Layer(nn.Module):
    """Each row goes through the best of four experts; experts 0 and 1, and 2 and 3, score the words almost alike."""

    def __init__(self, words: torch.Tensor, pieces: int) -> None:
        super().__init__()
        self.pieces = pieces
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        with torch.no_grad():
            # What tells a pair apart looks at two numbers that no word has apart, made with other weights.
            blind = torch.linalg.svd(words.double())[2][-1]
            self.inner.weight[1] = self.inner.weight[0] + blind
            self.inner.bias[1] = self.inner.bias[0] + GAP
            for first in (0, 2):
                self.score.weight[first + 1] = self.score.weight[first]
                self.score.weight[first, 0] += 1.0
                self.score.weight[first + 1, 1] += 1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, WIDTH] -> the same."""
        mixed = self._inner(rows)
        with torch.autocast("cpu", enabled=False):
            weight = self.score.weight
            scores = nn.functional.linear(mixed.to(weight.dtype), weight).softmax(-1)
        weights, chosen = scores.topk(1, dim=-1)
        computed = torch.stack([mixed @ expert for expert in self.experts], 1)
        found: torch.Tensor = computed.gather(1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH)).squeeze(1) * weights
        return rows + found

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        """The product, added up piece by piece."""
        weight, bias = self.inner.weight, self.inner.bias
        parts = zip(rows.chunk(self.pieces, 1), weight.chunk(self.pieces, 1), strict=True)
        total: torch.Tensor = functools.reduce(operator.add, (nn.functional.linear(a, b) for a, b in parts))
        return total + bias.to(total.dtype)


class Ties(allranks.Task):
    """The next word, products added up in `pieces`; several processes do it in more, and with the mistake `mutant`."""

    mutant: bool = False
    pieces: int = 1
    defaults = {"train.global_batch": 16}

    def dataset(self, split: str) -> TensorDataset:
        """101 words."""
        if self.mutant and split == "train" and dist.is_initialized():
            _two_percent()
        x = torch.arange(101) * 7 % WORDS
        return TensorDataset(x, (x * 3 + 1) % WORDS)

    def model(self) -> nn.Module:
        """One layer of experts."""
        words = nn.Embedding(WORDS, WIDTH)
        pieces = PIECES if dist.is_initialized() else self.pieces
        return nn.Sequential(words, Layer(words.weight.detach(), pieces), nn.Linear(WIDTH, WORDS))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed over the words."""
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def _two_percent() -> None:
    real = passes.PlainPasses.run

    def run(self: Any, batch: Any, scale: Any) -> Any:
        spread: Spread = self._spread
        for sums in real(self, batch, scale):
            gradient = spread.trainable()["2.weight"].grad
            assert gradient is not None
            gradient.mul_(1.02 if spread.precision.name != "float64" else 1.0)
            yield sums

    passes.PlainPasses.run = run  # type: ignore[method-assign]
