"""Batches that go round a group: whatever their tensors are, and nothing but tensors and JSON values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.stepping.swapping import swap
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


def batch_of(rank: int) -> dict[str, Any]:
    """Of each rank another length."""
    rows = rank + 2
    return {
        "x": [torch.arange(rows * 3, dtype=torch.bfloat16).reshape(rows, 3)[:, :2] + rank, torch.tensor(rank)],
        "mask": torch.ones(rows, dtype=torch.bool).logical_not(),
        "words": ("rank", rank, None, 0.5 + rank),
        "empty": torch.empty(0, 4, dtype=torch.float64),
    }


def swapped() -> list[Any]:
    """In a worker: whose batch it gets, and whether it is that one."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    found, (whose, key) = swap(batch_of(rank), [rank, (1 << 63) - 1 - rank], group, CPU)
    expected = batch_of(whose)
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        same = torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, torch.Tensor) else one == other
        assert same and type(one) is type(other), (one, other)
    stays, (other, _) = swap({"x": object()}, [rank, 0], group, CPU)
    return [whose, key == (1 << 63) - 1 - whose, stays, other]


@pytest.mark.distributed
def test_each_rank_gets_the_batch_of_the_one_before(pool: Pools) -> None:
    assert pool(3).run(swapped) == [[(rank - 1) % 3, True, None, (rank - 1) % 3] for rank in range(3)]


def unlike() -> Any:
    """In a worker: batches of two structures."""
    group = dist.group.WORLD
    assert group is not None
    return swap([1] if dist.get_rank() else (1,), [], group, CPU)[0]


@pytest.mark.distributed
def test_another_structure_is_not_taken_for_ones_own(pool: Pools) -> None:
    assert pool(2).run(unlike) == [None, None]
