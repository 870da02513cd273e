"""The points without dropout, for runs that are compared over numbers of processes."""

import torch
from points import Points as _Points  # type: ignore[import-not-found]
from torch import nn


class PlainPoints(_Points):  # type: ignore[misc]
    """Points without randomness."""

    def model(self) -> nn.Module:
        """Two layers."""
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 2)).to(torch.float64)
