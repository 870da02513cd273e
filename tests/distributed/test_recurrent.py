"""Recurrent models: nn.LSTM holds its weights in a list of its own besides (law 4)."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.verifying.parity import RecordedStep, compare, fed, record_run
from allranks.verifying.reference import plain_loop
from tests.distributed.pool import Pools
from tests.distributed.sessions import SGD, config_of, initial_model, processes_of
from tests.distributed.tasks import IGNORED, Points, Tiny

pytestmark = pytest.mark.distributed

STEPS = 3


class Recurrent(nn.Module):
    """Points as sequences of their five numbers, through two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x.unsqueeze(-1))
        found: torch.Tensor = self.head(hidden[:, -1])
        return found


class RecurrentTask(Tiny):
    def model(self) -> nn.Module:
        return Recurrent()


def record(layout: str) -> list[RecordedStep]:
    """In a worker: the steps."""
    config = config_of(
        layout, "train.global_batch=6", "train.micro_steps=2", *SGD, "optimizer.weight_decay=0.01", steps=STEPS
    )
    return record_run(RecurrentTask(), config, processes_of(config), STEPS)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_equal_to_one_device(pool: Pools, layout: str) -> None:
    ranks = pool(2).run(record, layout)
    task, batches = RecurrentTask(), []
    for step in range(STEPS):
        batch = default_collate([Points()[sample] for sample in fed(ranks, step, [0, 1]).values()])
        batches.append((batch, int((batch["y"] != IGNORED).sum())))
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
    model = initial_model(task).double()
    expected = plain_loop(model, optimizer, batches, lambda m, b: task.loss(m(b["x"].double()), b))
    assert not compare(ranks, expected)
