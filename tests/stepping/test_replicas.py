"""A bit that flips on one rank is found, with rank and tensor, along whichever axis copies lie."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.stepping.replicas import Difference, compare_replicas, find_differences
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of, step_through
from tests.distributed.tasks import Tiny


def flip(kind: str, layout: str, rank: int | None, sharded: bool = False) -> Any:
    """In a worker: what is found after two steps; the lowest bit of one number was flipped on `rank`."""
    config = config_of(layout, "train.global_batch=12", "optimizer.lr=0.01", precision="float32")
    session = session_of(Tiny(kind=kind), config)
    for _ in step_through(session, 2):
        pass
    names = [name for name in session.spread.trainable() if session.spread.map[name].sharded is sharded]
    name = names[-1]
    if dist.get_rank() == rank:
        session.spread.local(name).view(torch.int32).view(-1)[0] ^= 1
    found = compare_replicas(session.spread, session.processes.world_group)
    return name, None if found is None else (found.differences, sorted(found.hosts))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "layout", "sharded"),
    [
        ("mlp", "ddp", False),
        ("mlp", "dp_shard=2,sharding=optimizer", False),
        ("transformer", "tp=2", False),
    ],
)
def test_two_that_differ_are_named(pool: Pools, kind: str, layout: str, sharded: bool) -> None:
    assert {found for _, found in pool(2).run(flip, kind, layout, None, sharded)} == {None}
    for name, found in pool(2).run(flip, kind, layout, 1, sharded):
        assert found == ((Difference(name, (0, 1), ()),), [0, 1]), "there is no majority of two"


@pytest.mark.distributed
def test_of_three_the_one_is_outvoted(pool: Pools) -> None:
    for name, found in pool(3).run(flip, "mlp", "ddp", 2):
        assert found == ((Difference(name, (0, 1, 2), (2,)),), [0, 1, 2])


@pytest.mark.distributed
@pytest.mark.full
def test_parts_are_compared_with_those_who_hold_the_same(pool: Pools) -> None:
    assert {found for _, found in pool(4).run(flip, "mlp", "dp_replicate=2,dp_shard=2", None, True)} == {None}
    for name, found in pool(4).run(flip, "mlp", "dp_replicate=2,dp_shard=2", 3, True):
        assert found[0] == (Difference(name, (1, 3), ()),)


def test_votes() -> None:
    def told(*digests: str) -> list[list[list[Any]]]:
        everyone = list(range(len(digests)))
        return [[["w", everyone, digest], ["b", everyone, "0"]] for digest in digests]

    assert find_differences(told("1", "1", "1")) == ()
    assert find_differences(told("1", "2", "1")) == (Difference("w", (0, 1, 2), (1,)),)
    assert find_differences(told("1", "2", "1", "2")) == (Difference("w", (0, 1, 2, 3), ()),)
    assert find_differences(told("1", "2", "3")) == (Difference("w", (0, 1, 2), ()),)


def test_alone_there_is_nobody_to_compare_with() -> None:
    assert compare_replicas(session_of(Tiny(), config_of("single")).spread, None) is None
