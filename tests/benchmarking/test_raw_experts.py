"""The hand-written expert parallelism is DDP over whole experts."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.subject import LR, MAX_NORM, Tokens, make_moe
from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key
from allranks.layout import Layout
from tests.distributed.pool import Pools

STEPS, BATCH = 5, 8


def losses(layout: Layout) -> list[float]:
    """In a worker."""
    return [told() for told in raw_steps(layout, "tiny", STEPS, 0, torch.device("cpu"))]


def plain() -> list[float]:
    """The same in one process that has all experts and the whole batch."""
    torch.manual_seed(0)
    model, data = make_moe("tiny"), Tokens(16, STEPS * BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    order = permute(STEPS * BATCH, epoch_key(0, 0), torch.arange(STEPS * BATCH).numpy()).tolist()
    found = []
    for step in range(STEPS):
        samples = [data[index] for index in order[step * BATCH : (step + 1) * BATCH]]
        x, y = (torch.stack([sample[name] for sample in samples]) for name in ("x", "y"))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        model.update_balance()
        found.append(float(loss.detach()))
    return found


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("ep", [2, 4])
def test_cut_experts_learn_what_whole_ones_learn(pool: Pools, ep: int) -> None:
    for found in pool(4).run(losses, Layout(dp_replicate=4, ep=ep)):
        assert found == pytest.approx(plain(), rel=1e-5)
