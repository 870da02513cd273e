"""Batches of any pytree: lists, tuples and dicts in one another, on every axis that cuts or repeats them (law 4)."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import default_collate

from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of
from tests.distributed.tasks import IGNORED, Block, Points, Stack, Tiny, vector_gain

pytestmark = pytest.mark.distributed

STEPS = 2


class Nested(torch.utils.data.Dataset[Any]):
    """Points with a mask beside each, and their class in a tuple in a tuple."""

    def __len__(self) -> int:
        return len(Points())

    def __getitem__(self, index: int) -> Any:
        point = Points()[index]
        return {"in": [point["x"], {"mask": torch.arange(5) != index % 5}], "out": ((point["y"], index),)}


class Masked(nn.Module):
    """Points through blocks, of which the mask hides a value each."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack([Block(vector_gain()) for _ in range(4)])

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.stack(x * more["mask"])
        return found


class NestedTask(Tiny):
    def model(self) -> nn.Module:
        return Masked()

    def dataset(self, split: str) -> Any:
        return Nested()

    def inputs(self, batch: Any) -> Any:
        return tuple(batch["in"])

    def targets(self, batch: Any) -> int:
        return int((batch["out"][0][0] != IGNORED).sum())

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        classes, index = batch["out"][0]
        assert len(classes) == len(index) == len(output)
        return functional.cross_entropy(output, classes, reduction="sum", ignore_index=IGNORED)


def record(layout: str, global_batch: int, micro_steps: int) -> list[RecordedStep]:
    """In a worker: the steps."""
    cut = f"train.global_batch={global_batch}", f"train.micro_steps={micro_steps}"
    config = config_of(layout, *cut, *SGD, "optimizer.weight_decay=0.01", steps=STEPS)
    return record_run(NestedTask(), config, processes_of(config), STEPS)


@pytest.mark.parametrize(
    ("layout", "cut", "shares"),
    [
        ("ddp", (7, 2), [0, 1]),
        ("pp=2", (6, 2), [0]),
        pytest.param("pp=2,schedule=interleaved", (8, 4), [0], marks=pytest.mark.full),
        pytest.param("pp=2,dp_shard=2", (8, 2), [0, 1], marks=pytest.mark.full),
    ],
)
def test_a_nested_batch(pool: Pools, layout: str, cut: tuple[int, int], shares: list[int]) -> None:
    """`cut`: the global batch, and its micro-steps."""
    ranks = pool(4 if "dp_shard" in layout else 2).run(record, layout, *cut)
    task, batches = NestedTask(), []
    for step in range(STEPS):
        batch = default_collate([Nested()[sample] for sample in fed(ranks, step, shares).values()])
        batches.append((batch, task.targets(batch)))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    model = initial_model(task).double()
    expected = plain_loop(model, optimizer, batches, lambda m, b: task.loss(m(*doubled(task.inputs(b))), b))
    assert not compare(ranks, expected)


def doubled(inputs: Any) -> Any:
    x, more = inputs
    return x.double(), more
