"""The hand-written pipeline is the hand-written loop on one process."""

import pytest
import torch

from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.raw_pipeline import StageModule
from allranks.benchmarking.subject import make_model
from allranks.layout import Layout
from tests.distributed.pool import Pools


def test_the_stages_together_are_the_model() -> None:
    torch.manual_seed(0)
    model = make_model("tiny")
    tokens = torch.arange(32).view(2, 16)
    value = tokens
    for stage in range(2):
        value = StageModule(model, stage, 2)(value)
    assert torch.equal(value, model(tokens))


def losses(schedule: str) -> list[float]:
    """In a worker: of twenty steps."""
    found = raw_steps(Layout(pp=2, schedule=schedule), "tiny", 20, 0, torch.device("cpu"))
    return [told() for told in found]


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_it_learns_and_tells_every_rank(pool: Pools, schedule: str) -> None:
    first, second = pool(2).run(losses, schedule)
    assert first == second and len(first) == 20
    assert 5.4 < first[0] < 5.7 and sum(first[-5:]) < sum(first[:5])
