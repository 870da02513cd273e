"""Modules that a micro-step leaves out keep what the others taught them (law 4)."""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.task import Hints
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import Tiny

pytestmark = pytest.mark.distributed

STEPS = 3


class Turns(nn.Module):
    """Its blocks take turns: a unit of one micro-step has no part in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.ends = nn.ModuleDict({"a": nn.Linear(5, 3), "b": nn.Linear(5, 3, bias=False)})
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        turn = self.calls % 2
        found: torch.Tensor = self.ends["ab"[turn]](self.blocks[turn](x))
        return found


class TurnsTask(Tiny):
    declared: bool = False

    def model(self) -> nn.Module:
        return Turns()

    def hints(self) -> Hints:
        return Hints(optional=("blocks.*", "ends.*") if self.declared else ())


def take_turns(layout: str, declared: bool) -> Any:
    config = config_of(layout, "train.global_batch=13", "train.micro_steps=3", *SGD, "optimizer.weight_decay=0.01")
    session = session_of(TurnsTask(declared=declared), config)
    model = session.spread.bare()
    assert isinstance(model, Turns)
    model.calls = 0
    list(step_through(session, STEPS))
    return parts_of(session)


@pytest.mark.parametrize(
    ("layout", "world_size", "declared"),
    [
        ("ddp", 2, True),
        ("fsdp", 2, False),
        ("fsdp,sharding=none", 2, False),
        ("dp_replicate=2,dp_shard=2", 4, True),
    ],
)
def test_units_that_the_last_micro_step_does_not_reach_keep_their_gradients(
    pool: Pools, layout: str, world_size: int, declared: bool
) -> None:
    """Undeclared, HSDP refuses (see below) and DDP raises."""
    alone = together(pool(1).run(take_turns, "single", declared))
    found = together(pool(world_size).run(take_turns, layout, declared))
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-15), name
