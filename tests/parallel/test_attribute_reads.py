"""Who reads what a module of another stage would have set on itself is told; what is its own is not."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.parallel.attribute_reads import AttributeReads, set_in_forward


class Router(nn.Module):
    """Leaves a loss on itself in training, behind a look at values, and counts its calls."""

    aux_loss: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.aux_loss, self.calls, self.width = 0.0, 0, 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.linear(x)
        if self.training and bool(found.any()):
            self._keep(found)
        return found

    def _keep(self, found: torch.Tensor) -> None:
        self.aux_loss = found.square().mean()

    def resize(self, width: int) -> None:
        self.width = width

    def told(self) -> Any:
        return self.aux_loss


class Below(Router):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache = super().forward(x)
        return self.cache


def test_what_a_forward_sets_is_found_in_its_code() -> None:
    assert set_in_forward(Router) == {"calls", "aux_loss"}
    assert set_in_forward(Below) == {"calls", "aux_loss", "cache"}
    assert not set_in_forward(nn.Linear) and not set_in_forward(nn.BatchNorm1d)


@pytest.mark.parametrize("read", [lambda part: part.aux_loss, Router.told, lambda part: getattr(part, "aux_loss", 0)])
def test_a_read_from_outside_is_told_until_the_next_forward(read: Any) -> None:
    found: list[str] = []
    reads, part = AttributeReads(found.append), nn.Sequential(Router())
    reads.begin()
    reads.watch("blocks.0", part)
    assert type(part[0]).__name__ == "Router" and part[0].width == 3 and not found
    assert read(part[0]) == 0.0
    assert len(found) == 1 and found[0].startswith(
        "blocks.0.0 sets aux_loss in its forward, which test_attribute_reads.py:"
    )
    reads.begin()
    assert type(part[0]) is Router and read(part[0]) == 0.0 and len(found) == 1


def test_what_is_its_own_is_not_told() -> None:
    found: list[str] = []
    reads, router, shared = AttributeReads(found.append), Router(), Router()
    reads.begin([nn.Sequential(shared)])
    reads.watch("blocks.0", nn.Sequential(router, shared))
    router(torch.ones(2, 3))
    assert router.width == 3 and shared.aux_loss == 0.0 and router.state_dict()
    assert not found
