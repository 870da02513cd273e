"""The moves between whole tensors and parts, and the backward of each."""

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from allranks.parallel import tensor_ops
from allranks.parallel.tensor_ops import part_bounds
from tests.distributed.pool import Pools


@pytest.mark.parametrize(("extent", "num_parts"), [(6, 2), (7, 2), (7, 3), (5, 4), (3, 4), (0, 2)])
def test_parts_are_torchs(extent: int, num_parts: int) -> None:
    bounds = [part_bounds(extent, num_parts, index) for index in range(num_parts)]
    parts = [part.tolist() for part in torch.arange(extent).chunk(num_parts)] if extent else []
    expected = parts + [[]] * (num_parts - len(parts))
    assert [list(range(start, end)) for start, end in bounds] == expected


def run(name: str, dim: int, extent: int) -> tuple[Any, Any]:
    """In a worker: (value, gradient) of one move; values and gradients are multiples of the rank's number plus one."""
    group, scale = dist.group.WORLD, dist.get_rank() + 1.0
    assert group is not None
    size = dist.get_world_size()
    whole = torch.arange(extent * 2, dtype=torch.float64).reshape(extent, 2)
    whole = whole if dim == 0 else whole.T.contiguous()
    start, end = part_bounds(extent, size, dist.get_rank())
    cut = name.startswith("gather")
    given = (whole.narrow(dim, start, end - start) if cut else whole * scale).clone().requires_grad_()
    arguments = {"enter": (), "leave": (), "split": (dim,), "sum_split": (dim,)}.get(name, (dim, extent))
    found = getattr(tensor_ops, name)(given, group, *arguments)
    outside = whole.narrow(dim, start, end - start) if name.endswith("split") else whole
    found.backward(outside * scale)
    return found.detach(), given.grad


@pytest.mark.distributed
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize(("world_size", "extent"), [(2, 4), (2, 5), (4, 5)])
def test_each_move_and_its_backward(pool: Pools, world_size: int, extent: int, dim: int) -> None:
    whole = torch.arange(extent * 2, dtype=torch.float64).reshape(extent, 2)
    whole = whole if dim == 0 else whole.T.contiguous()
    ranks = range(world_size)
    bounds = [part_bounds(extent, world_size, rank) for rank in ranks]
    parts = [whole.narrow(dim, start, end - start) for start, end in bounds]
    summed = sum(ranks) + world_size
    weighted = torch.cat([part * (rank + 1) for rank, part in zip(ranks, parts, strict=True)], dim)
    expected = {
        "enter": [(whole * (rank + 1), whole * summed) for rank in ranks],
        "leave": [(whole * summed, whole * (rank + 1)) for rank in ranks],
        "gather": [(whole, part * (rank + 1)) for rank, part in zip(ranks, parts, strict=True)],
        "gather_sum": [(whole, part * summed) for part in parts],
        "split": [(part * (rank + 1), weighted) for rank, part in zip(ranks, parts, strict=True)],
        "sum_split": [(part * summed, weighted) for part in parts],
    }
    for name, pairs in expected.items():
        for rank, (found, wanted) in enumerate(zip(pool(world_size).run(run, name, dim, extent), pairs, strict=True)):
            assert torch.equal(found[0], wanted[0]), (name, rank)
            assert torch.equal(found[1], wanted[1]), (name, rank)


def run_compiled(name: str, dim: int, extent: int, gloo: bool) -> tuple[Any, Any]:
    """The same of a move compiled for any size, on the way that goes with gloo or that with NCCL, whichever it is."""
    import torch._dynamo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(getattr(tensor_ops, name), backend="eager", dynamic=True)
        with patch.object(tensor_ops, name, compiled), patch.object(tensor_ops, "is_gloo", lambda *_: gloo):
            try:
                return run(name, dim, extent)
            finally:
                torch._dynamo.reset()


@pytest.mark.sample(3)
@pytest.mark.distributed
@pytest.mark.parametrize("gloo", [True, False])
@pytest.mark.parametrize("name", ["enter", "leave", "gather", "gather_sum", "split", "sum_split"])
def test_a_compiled_move_has_its_backward(pool: Pools, name: str, gloo: bool) -> None:
    """torch 2.11's compiler has none for a tensor that was changed in place and returned."""
    plain, compiled = pool(2).run(run, name, 0, 4), pool(2).run(run_compiled, name, 0, 4, gloo)
    for one, other in zip(plain, compiled, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def shared_gradient() -> torch.Tensor:
    """In a worker: the gradient of what stands beside a cut layer, from one tensor that both are given."""
    group = dist.group.WORLD
    assert group is not None
    value = torch.ones(3, dtype=torch.float64, requires_grad=True)
    beside = value * 1.0
    (beside + tensor_ops.enter(value, group)).backward(torch.ones(3, dtype=torch.float64))
    assert value.grad is not None
    return value.grad


@pytest.mark.distributed
def test_summing_a_gradient_leaves_that_of_the_others(pool: Pools) -> None:
    assert pool(2).run(shared_gradient)[0].tolist() == [3.0, 3.0, 3.0]
