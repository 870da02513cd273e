"""Words through an embedding, eight blocks and a head: the names of docs/how-to/placement.md."""

from typing import Any

import torch
from torch import nn

import allranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(6, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        found: torch.Tensor = self.head(hidden)
        return found


class Words(allranks.Task):
    def model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Any:
        words = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": row} for row in words]

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")
