"""What no rank's loss reaches has no gradient, under every layout as on one device (law 4).

With a gradient of zeros weight decay would move it, and momentum would remember it.
"""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.parallel.expert import is_experts
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, parts_of, session_of, step_through, together
from tests.distributed.tasks import MODELS, Block, Stack, Tiny, vector_gain

pytestmark = pytest.mark.distributed

OPTIONS = (*SGD, "optimizer.weight_decay=0.1", "train.global_batch=8", "train.micro_batch=2")


class IdleBlock(Block):
    """With a layer, and a parameter without dims, that it never uses."""

    def __init__(self) -> None:
        super().__init__(vector_gain())
        self.idle = nn.Linear(3, 3)
        self.idle_scalar = nn.Parameter(torch.rand(()))


def idle() -> nn.Module:
    """Blocks of them, and an unused parameter of the model's own, which every stage holds."""
    model = Stack([IdleBlock() for _ in range(4)])
    model.register_parameter("idle_own", nn.Parameter(torch.rand(3)))
    return model


def idle_experts() -> nn.Module:
    """Experts with a parameter that they never use."""
    model = MODELS["moe"]()
    for member in model.modules():
        if is_experts(member):
            member.register_parameter("idle", nn.Parameter(torch.rand(4, 3)))
    return model


class IdleTask(Tiny):
    def model(self) -> nn.Module:
        return idle_experts() if self.kind == "moe" else idle()


def run_idle(kind: str, layout: str) -> Any:
    session = session_of(IdleTask(kind=kind), config_of(layout, *OPTIONS))
    list(step_through(session, 3))
    return parts_of(session)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("layout", "world_size", "kind"),
    [
        ("pp=2", 2, "mlp"),  # what the stages share
        ("pp=2,dp_replicate=2", 4, "mlp"),  # what is reduced after the schedule
        ("fsdp", 2, "mlp"),  # what FSDP2 cannot cut
        ("dp_replicate=2,ep=2", 2, "moe"),
        ("dp_replicate=2,dp_shard=2,ep=2", 4, "moe"),  # two groups of experts
    ],
)
def test_what_is_never_used_stays(pool: Pools, layout: str, world_size: int, kind: str) -> None:
    alone = together(pool(1).run(run_idle, kind, "single"))
    assert not any("idle" in name and name.startswith("optimizer.") for name in alone)
    found = together(pool(world_size).run(run_idle, kind, layout))
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-14), name
