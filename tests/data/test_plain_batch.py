"""Mappings that pytree does not know become dicts, wherever they lie in a batch, and in whatever a Task is fed."""

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.plain_batch import plain_batch
from allranks.data.stream import DataStream
from allranks.task import Task
from tests.distributed.sessions import config_of, session_of

Pair = namedtuple("Pair", "x y")


def test_only_what_pytree_does_not_know_is_replaced() -> None:
    one = torch.ones(2)
    known = OrderedDict(a=Pair(one, [one]))
    assert plain_batch(known) is known and plain_batch(one) is one
    inner = Pair(UserDict(y=one), 3)
    found = plain_batch(UserDict(a=known, b=[UserDict(x=inner)]))
    assert type(found) is dict and found["a"] is known and type(found["b"][0]) is dict
    assert found["b"][0]["x"] == Pair({"y": one}, 3) and type(found["b"][0]["x"].x) is dict


def encoded(samples: list[Any]) -> Any:
    """As Hugging Face's collators do."""
    return UserDict(default_collate(samples))


class Encoded(Task):
    """Its batches are no dicts."""

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def dataset(self, split: str) -> Any:
        rows = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
        return [{"x": row, "y": row.sum()} for row in rows]

    def collate(self, samples: list[Any]) -> Any:
        return encoded(samples)

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        assert type(batch) is dict and batch["y"].dtype is output.dtype
        found: torch.Tensor = (output[:, 0] - batch["y"]).square().sum()
        return found


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_come_as_dicts(workers: int) -> None:
    stream = DataStream(Encoded().dataset("train"), cut=Cut(4), epochs=1)
    with Loader(stream, collate=encoded, workers=workers) as loader:
        assert [type(step.micro_steps[0].batch) for step in loader] == [dict] * 3


def test_a_task_is_placed_and_cast_as_with_dicts() -> None:
    session = session_of(Encoded(), config_of("single", "train.global_batch=4", "train.precision=float64"))
    with session.loader() as loader:
        batch: Any = session.forward.place(next(loader).micro_steps[0].batch)
    assert batch["x"].dtype is torch.float64
    assert session.forward.task.loss(session.forward(batch), batch).dtype is torch.float64
