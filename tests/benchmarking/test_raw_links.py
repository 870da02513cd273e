"""Slow links by hand: what travels is what torch's hooks make of it, and copies meet as DiLoCo has it."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.raw_links import Meetings
from allranks.layout import Layout
from tests.distributed.pool import Pools

STEPS = 6


def losses(layout: Layout) -> list[float]:
    """In a worker."""
    return [told() for told in raw_steps(layout, "tiny", STEPS, 0, torch.device("cpu"))]


@pytest.mark.distributed
def test_compressed_gradients_make_nearly_the_same_steps(pool: Pools) -> None:
    plain = pool(2).run(losses, Layout(dp_replicate=2))[0]
    hooks: list[Any] = ["bfloat16", "float16", "powersgd"]
    for hook, apart in zip(hooks, (1e-3, 1e-3, 1e-1), strict=True):
        found = pool(2).run(losses, Layout(dp_replicate=2, ddp_hook=hook, powersgd_start=2))
        assert found[0] == found[1]
        assert found[0] == pytest.approx(plain, rel=apart) and found[0] != plain, hook
        assert found[0][0] == plain[0]


@pytest.mark.distributed
def test_copies_train_by_themselves_and_meet(pool: Pools) -> None:
    """On two ranks, by hand: the mean move of two steps, taken with Nesterov's momentum."""

    def case() -> list[float]:
        parameter = torch.nn.Parameter(torch.tensor([1.0]))
        model = torch.nn.Module()
        model.register_parameter("one", parameter)
        layout = Layout(dp_replicate=2, local_sgd=2, outer_lr=0.5, outer_momentum=0.5)
        meetings, seen = Meetings(model, layout), list[float]()
        for step in range(1, 5):
            with torch.no_grad():
                parameter.sub_(0.1 * (1 + dist.get_rank()))
            meetings.after(step)
            seen.append(float(parameter.detach()))
        return seen

    # Moved 0.2 and 0.4, 0.3 on the average; Nesterov's first step takes (1 + 0.5) of it, and half of that.
    first = 1 - 0.5 * 1.5 * 0.3
    buffer = 0.5 * 0.3 + 0.3
    second = first - 0.5 * (0.3 + 0.5 * buffer)
    for rank, seen in enumerate(pool(2).run(case)):
        moved = 0.1 * (1 + rank)
        assert seen == pytest.approx([1 - moved, first, first - moved, second], abs=1e-6)


@pytest.mark.distributed
def test_copies_that_meet_learn(pool: Pools) -> None:
    found = pool(2).run(losses, Layout(dp_replicate=2, local_sgd=2))
    assert found[0] == found[1]
    assert all(math.isfinite(loss) and 5.0 < loss < 6.0 for loss in found[0])
