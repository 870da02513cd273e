"""What waits in the host's memory, counted by hand for a model whose sizes are powers of two.

Every block has a weight of 1 MiB; on 1,024 samples it keeps its input and its output, 2 MiB each.
tests/distributed/test_rehearsed_offload.py holds a dry run to real steps.
"""

from typing import Any

import pytest
import torch
from torch import nn

from allranks.errors import LayoutError
from allranks.rehearsal import RankRehearsal
from allranks.rehearsed_messages import Transfer
from allranks.task import Hints, Task
from tests.rehearsing.tasks import Tokens, rehearsed

MIB = 2**20
WIDTH, ROWS = 512, 1024


class Squares(Task):
    """`layers` square matrices with a ReLU behind each."""

    layers: int = 4
    width: int = WIDTH

    def model(self) -> nn.Module:
        return Stack(self.layers, self.width)

    def dataset(self, split: str) -> Any:
        return [{"x": torch.zeros(self.width), "y": 0}] * (4 * ROWS) if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch["y"], reduction="sum")

    def hints(self) -> Hints:
        return Hints(blocks=("layers.*",))


class Block(nn.Module):
    """Keeps for its backward what it is given and what it gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.linear(x))


class Stack(nn.Module):
    """Blocks in a row."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def told(
    layout: str, world: int, layers: int = 4, width: int = WIDTH, *, full: bool = False, on_cuda: bool = True
) -> RankRehearsal:
    """Two micro-steps of 1,024 samples a rank."""
    cut = f"train.global_batch={2 * ROWS * world}", f"train.micro_batch={ROWS}", "train.steps=2"
    return rehearsed(Squares(layers=layers, width=width), layout, world, *cut, full=full, on_cuda=on_cuda)


@pytest.mark.full
def test_parameters_gradients_and_the_optimizers_state_wait_on_the_host() -> None:
    found, plain = told("fsdp,offload=parameters", 2), told("fsdp", 2)
    shards = 4 * MIB // 2
    steps = 4 * 4  # Adam counts in one number a parameter
    added = shards // 4  # the second micro-step's gradient of one block, which the host adds to the first one's
    gradients = shards + added
    assert found.host_by_category == {"weights": shards, "gradients": gradients, "optimizer": 2 * shards + steps}
    assert found.host_peak_bytes == 4 * shards + added + steps
    # Every shard comes for the forward and for the backward of both micro-steps, and its gradient goes back. Between
    # two micro-steps FSDP2 gathers one block too many, with offload or without.
    large = [one for one in plain.collectives if one.bytes > 1000]  # but for the norm's
    gathers = sum(one.count for one in large if one.op == "all-gather")
    assert gathers == 2 * 2 * 4 + 1
    assert found.transfers == (
        Transfer("gradients", "host", 2 * shards, 2 * 4),
        Transfer("parameters", "device", gathers * shards // 4, gathers),
    )
    assert found.collectives == plain.collectives
    assert not {"weights", "gradients", "optimizer"} & found.by_category.keys()
    assert {"weights", "optimizer"} <= plain.by_category.keys() and plain.transfers == ()
    batch = plain.resting_bytes - 3 * shards - steps // 4 * 512
    assert found.resting_bytes == batch
    assert plain.host_peak_bytes == 0


def test_what_the_host_adds_up_and_the_optimizers_state_are_not_pinned() -> None:
    """Pinned memory comes in powers of two: FSDP2 takes it for shards, and for gradients that it does not wait for."""
    found, shard = told("fsdp,offload=parameters", 2, width=384), 384 * 384 * 4 // 2
    pinned, steps = MIB // 2, 4 * 4
    gradients = 4 * pinned + shard
    assert found.host_by_category == {"weights": 4 * pinned, "gradients": gradients, "optimizer": 8 * shard + steps}


def test_activations_wait_on_the_host() -> None:
    found = told("single,offload=activations", 1)
    kept = 2 * 4 * 2 * MIB
    assert found.host_by_category == {"activations": kept} and found.host_peak_bytes == kept
    # In both micro-steps.
    assert found.transfers == (
        Transfer("activations", "device", 2 * kept, 2 * 2 * 4),
        Transfer("activations", "host", 2 * kept, 2 * 2 * 4),
    )


def test_what_the_device_keeps_of_activations_does_not_grow_with_depth() -> None:
    shallow, deep = (told("single,offload=activations", 1, layers, full=True) for layers in (4, 8))
    two_blocks_and_two_gradients = (2 * 2 + 2) * 2 * MIB
    assert shallow.by_category["activations"] == deep.by_category["activations"] <= two_blocks_and_two_gradients
    # Weight, gradient and two moments of four more blocks.
    assert deep.peak_bytes - shallow.peak_bytes == pytest.approx(4 * 4 * MIB, abs=4 * 512)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("layout", "world"), [("fsdp,offload=all", 2), ("fsdp,offload=all,recompute=full", 2)])
def test_a_short_trace_agrees_with_the_full_one(layout: str, world: int) -> None:
    short, full = (told(layout, world, 9, full=full) for full in (False, True))
    assert short.traced < full.traced == 9
    assert short.peak_bytes == pytest.approx(full.peak_bytes, rel=0.01)
    assert short.host_peak_bytes == full.host_peak_bytes
    assert short.transfers == full.transfers
    assert short.host_by_category == full.host_by_category
    # Gradients of blocks that were left out are given where real ones would lie, and go there.
    assert short.moments[-1].live_bytes == full.moments[-1].live_bytes == full.resting_bytes


@pytest.mark.full
def test_of_micro_steps_that_are_alike_every_transfer_is_counted() -> None:
    words = ("train.global_batch=10", "train.micro_batch=1")
    short, full = (
        rehearsed(Tokens(layers=1), "fsdp,offload=parameters", 2, *words, full=full, on_cuda=True)
        for full in (False, True)
    )
    assert short.transfers == full.transfers
    assert short.host_peak_bytes == full.host_peak_bytes


def test_of_recomputed_blocks_the_inputs_alone_wait() -> None:
    found = told("single,offload=activations,recompute=full", 1)
    assert found.host_peak_bytes == 4 * 2 * MIB


def test_a_processor_has_no_host_beside_it() -> None:
    with pytest.raises(LayoutError, match="this device is the CPU: leave it out"):
        told("single,offload=activations", 1, on_cuda=False)
    with pytest.raises(LayoutError, match="this device is the CPU: there they are anyway"):
        told("fsdp,offload=parameters", 2, on_cuda=False)
