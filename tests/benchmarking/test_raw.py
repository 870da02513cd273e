"""The hand-written side on one process is a plain loop, and it learns."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.benchmarking.raw import make_optimizer, raw_steps, spread
from allranks.benchmarking.subject import make_model
from allranks.layout import Layout
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


def test_losses_of_the_plain_loop() -> None:
    losses = [told() for told in raw_steps(Layout(kind="single"), "tiny", 40, 0, CPU)]
    assert len(losses) == 40
    assert 5.4 < losses[0] < 5.7  # ln 256 = 5.55
    assert sum(losses[-5:]) < sum(losses[:5])


def test_recompute_wraps_every_block() -> None:
    model = spread(make_model("tiny"), Layout(kind="single", recompute="full"), None, CPU)
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 4


class Ran(TorchDispatchMode):
    """Counts what really runs: kept results are found before it is asked."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def gradients(layout: Layout) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = spread(make_model("tiny"), layout, None, CPU)
    model(torch.arange(32).view(2, 16)).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_selective_recompute_keeps_attention_and_every_second_product() -> None:
    expected, products = gradients(Layout(kind="single")), dict[str, int]()
    for mode in ("none", "selective", "full"):
        with Ran() as seen:
            found = gradients(Layout(kind="single", recompute=mode))
        torch.testing.assert_close(found, expected)
        products[mode] = seen.counts["aten.mm.default"]
        assert seen.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 4 * (1 + (mode == "full"))
    # The last of the seven products of a block's forward is needed by nobody; of the others every second is kept.
    assert products["full"] == products["none"] + 6 * 4 and products["selective"] == products["none"] + 3 * 4


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
