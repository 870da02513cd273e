"""Batches that go round a group: whatever their tensors are, and nothing but tensors and JSON values."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from numpy import float64
from torch.utils import _pytree as pytree

from allranks.stepping.swapping import Parcel
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


def batch_of(rank: int) -> dict[str, Any]:
    """Of each rank another length."""
    rows = rank + 2
    return {
        "x": [torch.arange(rows * 3, dtype=torch.bfloat16).reshape(rows, 3)[:, :2] + rank, torch.tensor(rank)],
        "image": torch.arange(rows * 12.0).reshape(rows, 2, 2, 3).permute(0, 3, 1, 2),
        "odd": torch.arange(rows * 3 + 1.0)[1:].reshape(rows, 3)[:, :2],
        "same": torch.full((1, 3), rank, dtype=torch.int32 if rank else torch.int64).expand(rows, 3),
        "windows": torch.arange(rows + 3.0).unfold(0, 4, 1),
        "column": torch.arange(rows * 100.0).reshape(rows, 100)[:, 7],
        "mask": torch.ones(rows, dtype=torch.bool).logical_not(),
        "words": ("rank", rank, None, 0.5 + rank),
        "empty": torch.empty(0, 4, dtype=torch.float64),
    }


def same_batch(found: Any, expected: Any) -> None:
    """Structure, types, values, and how all but a column lies in memory."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(found), pytree.tree_flatten(expected)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other), (one, other)
        if not isinstance(one, torch.Tensor):
            assert one == other
            continue
        assert torch.equal(one, other) and one.dtype == other.dtype
        assert one.stride() == ((1,) if other.stride() == (100,) else other.stride())
        assert one.data_ptr() % 16 == 0


def test_a_rank_sees_its_own_batch_as_its_receiver_does() -> None:
    same_batch(Parcel(batch_of(1), []).again(), batch_of(1))
    column = Parcel(batch_of(1), []).again()["column"]
    assert column.untyped_storage().nbytes() == column.numel() * 4, "without what lies between"


class Marked(torch.Tensor):
    """A tensor that means more than its numbers."""


@pytest.mark.parametrize(
    "leaf",
    [
        object(),
        float64(1.5),
        torch.zeros(2).as_subclass(Marked),
        torch.zeros(2, requires_grad=True),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2).to_sparse(),
    ],
    ids=["object", "numpy", "subclass", "grad", "complex", "sparse"],
)
def test_what_bytes_do_not_tell_stays_at_home(leaf: Any) -> None:
    batch = {"x": torch.zeros(2), "other": leaf}
    assert Parcel(batch, []).again() is batch


def swapped() -> list[Any]:
    """In a worker: whose batch it gets, and whether it is that one."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    found, (whose, key) = Parcel(batch_of(rank), [rank, (1 << 63) - 1 - rank]).swap(group, CPU)
    same_batch(found, batch_of(whose))
    stays, (other, _) = Parcel({"x": object()}, [rank, 0]).swap(group, CPU)
    return [whose, key == (1 << 63) - 1 - whose, stays, other]


@pytest.mark.distributed
def test_each_rank_gets_the_batch_of_the_one_before(pool: Pools) -> None:
    assert pool(3).run(swapped) == [[(rank - 1) % 3, True, None, (rank - 1) % 3] for rank in range(3)]


def unlike() -> Any:
    """In a worker: batches of two structures."""
    group = dist.group.WORLD
    assert group is not None
    return Parcel([1] if dist.get_rank() else (1,), []).swap(group, CPU)[0]


@pytest.mark.distributed
def test_another_structure_is_not_taken_for_ones_own(pool: Pools) -> None:
    assert pool(2).run(unlike) == [None, None]
