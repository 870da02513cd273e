"""The hand-written expert parallelism is DDP over whole experts."""

import pytest
import torch

from allranks.benchmarking.raw import raw_steps
from allranks.layout import Layout
from tests.benchmarking.plain_loop import plain_losses
from tests.distributed.pool import Pools

STEPS, BATCH = 5, 8


def losses(layout: Layout) -> list[float]:
    """In a worker."""
    return [told() for told in raw_steps(layout, "tiny", STEPS, 0, torch.device("cpu"))]


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("ep", [2, 4])
def test_cut_experts_learn_what_whole_ones_learn(pool: Pools, ep: int) -> None:
    for found in pool(4).run(losses, Layout(dp_replicate=4, ep=ep)):
        assert found == pytest.approx(plain_losses(STEPS, BATCH, experts=True), rel=1e-5)
