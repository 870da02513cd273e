"""Ranks that are fed the same samples, others than they must share, or not those of the step."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from allranks.stepping.feeding import ROWS, rows_of
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Points, Tiny
from tests.stepping.rounds import hold_round


class Stream(IterableDataset[Any]):
    """Declares that it gives each process a part of its own; and does, if `parts`."""

    order = "sharded"

    def __init__(self, parts: bool, same: bool = False) -> None:
        self.parts, self.same = parts, same

    def __iter__(self) -> Iterator[Any]:
        first = dist.get_rank() if self.parts and dist.is_initialized() else 0
        points = Points()
        return (points[0 if self.same else index] for index in range(first, len(points), 2))


class Clocked(Points):
    """Its noise comes from a generator of its own, which every process begins elsewhere; once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.armed = random.Random(), False

    def __getitem__(self, index: int) -> Any:
        item = dict(super().__getitem__(index))
        return item | {"x": item["x"] + self.generator.random()} if self.armed else item


class Fed(Tiny):
    """Points from a dataset that is right or wrong."""

    how: str = ""

    def dataset(self, split: str) -> Any:
        wrong = {"whole": Stream(False), "parts": Stream(True), "same": Stream(False, same=True), "clock": Clocked()}
        return wrong.get(self.how) or super().dataset(split)


def fed(how: str, layout: str, steps: int = 2, shift: int = 0) -> Any:
    """What rounds after each step find; `shift`: rank 1 takes the share of so many ranks before it."""
    session = session_of(Fed(how=how), config_of(layout, "train.global_batch=8", "guard.digest_every=1", steps=steps))
    session.stream.dataset.armed = True
    if shift and dist.get_rank() == 1:
        session.stream.dp_rank -= shift
    found: dict[str, Any] = {}
    for number, _ in enumerate(step_through(session, steps), start=1):
        verdict = hold_round(session, number).get("samples")
        if verdict is not None and not found:
            found = {"kind": verdict.kind, "what": verdict.what}
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "layout"), [("", "ddp"), ("parts", "ddp"), ("same", "ddp"), ("", "tp=2")])
def test_what_is_right_or_a_constant_is_silent(pool: Pools, how: str, layout: str) -> None:
    assert pool(2).run(fed, how, layout) == [{}, {}]


@pytest.mark.distributed
def test_a_stream_that_nobody_shards_is_found(pool: Pools) -> None:
    for found in pool(2).run(fed, "whole", "ddp"):
        assert found["kind"] == "fed_alike"
        assert found["what"].startswith("step 2: ranks 0 and 1 are fed the same samples: 8 rows were alike")


@pytest.mark.distributed
def test_ranks_of_one_layer_have_to_see_the_same(pool: Pools) -> None:
    for found in pool(2).run(fed, "clock", "tp=2"):
        assert found["kind"] == "fed_apart" and found["what"].startswith("step 1: ranks 0 and 1 have to see the same")
    assert pool(2).run(fed, "clock", "ddp") == [{}, {}], "where each has its own nothing can be said"


@pytest.mark.distributed
def test_each_sample_has_to_be_fed_once(pool: Pools) -> None:
    for found in pool(2).run(fed, "", "ddp", 1, 1):
        assert found["kind"] == "samples_wrong"
        assert found["what"].startswith("step 1: what the ranks have fed are not the samples of this step, each once")


def test_rows() -> None:
    batch = {
        "x": torch.arange(6.0).reshape(3, 2),
        "y": torch.tensor([1, 2, 1]),
        "n": torch.tensor(3),
        "z": torch.zeros(2),
    }
    first, second, third = rows_of(batch)
    assert len({first, second, third}) == 3
    assert rows_of(batch | {"z": torch.ones(2)}) == [first, second, third], "of another length: no row of it"
    assert rows_of(batch | {"y": torch.tensor([1, 2, 3])})[:2] == [first, second]
    assert rows_of(batch | {"y": torch.tensor([1, 2, 3])})[2] != third
    assert len(rows_of(torch.zeros(99, 3))) == ROWS and rows_of(["no tensor"]) == []
    assert len(rows_of(torch.zeros(2, 3, dtype=torch.bfloat16))) == 2


def told_again() -> list[Any]:
    """In a worker: two rounds after one step, of ranks that are fed four samples alike, which may be chance."""
    config = config_of("ddp", "train.global_batch=8", "guard.digest_every=1", steps=2)
    session = session_of(Fed(how="whole"), config)
    list(step_through(session, 1))
    return [hold_round(session, 1) for _ in range(2)]


@pytest.mark.distributed
def test_a_round_without_a_step_counts_nothing_twice(pool: Pools) -> None:
    for rounds in pool(2).run(told_again):
        assert [found.get("samples") for found in rounds] == [None, None]
