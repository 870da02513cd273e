"""HSDP between micro-steps: what it would lose without a word is refused."""

import pytest
import torch
from torch import nn

from allranks.errors import TaskError
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny

pytestmark = pytest.mark.distributed


class EverySecond(nn.Module):
    """Its second block has no part in every second micro-step; with `swap` two scales of the root's take turns."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((5,), 0.1)) for _ in range(2 * swap))
        self.end = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        turn = self.calls % 2
        x = self.blocks[0](x)
        if len(self.scales):
            x = self.blocks[1](x) * self.scales[turn]
        elif turn:
            x = self.blocks[1](x)
        found: torch.Tensor = self.end(x)
        return found


class EverySecondTask(Tiny):
    swap: bool = False

    def model(self) -> nn.Module:
        return EverySecond(self.swap)


def refusal_of(swap: bool, micro_steps: int) -> str:
    config = config_of("dp_replicate=2,dp_shard=2", "train.global_batch=13", f"train.micro_steps={micro_steps}")
    session = session_of(EverySecondTask(swap=swap), config)
    model = session.spread.bare()
    assert isinstance(model, EverySecond)
    model.calls = 0
    # What the samples at the start showed is forgotten: what no sample showed there is the case.
    session.spread.find_unused = False
    try:
        list(step_through(session, 2))
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("swap", "unit"), [(False, "blocks.1"), (True, "the model")])
def test_hsdp_refuses_where_it_would_lose_gradients(pool: Pools, swap: bool, unit: str) -> None:
    for refusal in pool(4).run(refusal_of, swap, 2):
        assert f"reach different parameters of {unit}: name those in hints().optional" in refusal


def test_hsdp_with_one_micro_step_has_nothing_to_lose(pool: Pools) -> None:
    assert pool(4).run(refusal_of, False, 1) == [""] * 4
