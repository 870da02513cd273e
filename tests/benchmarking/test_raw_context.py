"""The hand-written Ulysses and the ring are the hand-written loop on one process."""

from typing import Literal

import pytest
import torch

from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.subject import samples_a_step
from allranks.layout import Layout
from tests.benchmarking.plain_loop import plain_losses
from tests.distributed.pool import Pools

STEPS = 5


def losses(layout: Layout) -> list[float]:
    return [told() for told in raw_steps(layout, "tiny", STEPS, 0, torch.device("cpu"))]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_its_losses_are_those_of_one_process(pool: Pools, size: int, context: Literal["ulysses", "ring"]) -> None:
    expected = losses(Layout(kind="single"))
    for found in pool(size).run(losses, Layout(cp=size, context=context)):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        Layout(cp=2, dp_replicate=2),
        Layout(cp=2, dp_shard=2),
        pytest.param(Layout(cp=2, dp_replicate=2, context="ring"), marks=pytest.mark.full),
        pytest.param(Layout(cp=2, dp_shard=2, context="ring", sharding="grad_op"), marks=pytest.mark.full),
    ],
    ids=repr,
)
def test_beside_a_data_axis_its_losses_are_those_of_one_process(pool: Pools, layout: Layout) -> None:
    expected = plain_losses(STEPS, samples_a_step(layout))
    for found in pool(4).run(losses, layout):
        assert found == pytest.approx(expected, rel=1e-5)
