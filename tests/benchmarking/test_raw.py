"""The hand-written side on one process is a plain loop, and it learns."""

from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from allranks.benchmarking.raw import make_optimizer, raw_steps, spread
from allranks.benchmarking.subject import make_model
from allranks.layout import Layout
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inductor_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when its compiler is imported


def test_losses_of_the_plain_loop() -> None:
    losses = [told() for told in raw_steps(Layout(kind="single"), "tiny", 40, 0, CPU)]
    assert len(losses) == 40
    assert 5.4 < losses[0] < 5.7  # ln 256 = 5.55
    assert sum(losses[-5:]) < sum(losses[:5])


def test_recompute_wraps_every_block() -> None:
    model = spread(make_model("tiny"), Layout(kind="single", recompute="full"), None, CPU)
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 2


@pytest.mark.distributed
def test_zero_1_is_torchs_own(pool: Pools) -> None:
    """Each rank keeps the state of whole parameters, and only of its own."""
    kept = pool(2).run(_kept_after_a_step)
    assert all(0 < own < sum(kept) for own in kept)
    assert sum(kept) == 2 * sum(parameter.numel() for parameter in make_model("tiny").parameters())


def _kept_after_a_step() -> int:
    """In a worker: the numbers in this rank's optimizer state, its counts of steps aside."""
    torch.manual_seed(0)
    model = make_model("tiny")
    optimizer = make_optimizer(model, Layout(dp_shard=2, sharding="optimizer"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = optimizer.optim.state.values()  # type: ignore[attr-defined]
    return sum(tensor.numel() for state in states for name, tensor in state.items() if name != "step")
