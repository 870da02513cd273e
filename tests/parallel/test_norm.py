"""The global norm and clipping by it, over any mixture of placements."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from allranks.parallel.norm import clip_gradients
from tests.distributed.pool import Pools


def parameters(*gradients: Any, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    for gradient in gradients:
        tensor = torch.as_tensor(gradient, dtype=dtype)
        parameter = nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor.clone()
        made.append(parameter)
    return made


def gradients(some: list[torch.Tensor]) -> list[Any]:
    return [None if p.grad is None else p.grad.tolist() for p in some]


def test_the_norm_is_over_all_of_them() -> None:
    some = parameters([3.0], [[4.0]], 12.0)
    assert clip_gradients(some, None).item() == 13.0
    assert gradients(some) == [[3.0], [[4.0]], 12.0]


def test_clipping_is_torchs_own() -> None:
    for max_norm in (0.5, 2.0, 13.0, 14.0):
        ours, theirs = (parameters([3.0, -1.0], [[4.0]], 12.0) for _ in range(2))
        norm = clip_gradients(ours, max_norm)
        expected = nn.utils.clip_grad_norm_(theirs, max_norm)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-15)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.grad is not None and other.grad is not None
            assert torch.allclose(mine.grad, other.grad, rtol=1e-14)


def test_the_norm_is_where_sums_travel() -> None:
    """As for gradients that wait in the host's memory; meta stands for an accelerator."""
    meta = torch.device("meta")
    for some in (parameters([3.0], [4.0]), []):
        assert clip_gradients(some, None, device=meta).device == meta
    norm = clip_gradients(parameters([3.0]), 1.0, torch.tensor(2.0), device=torch.device("cpu"))
    assert norm.item() == 6.0


def test_a_norm_within_the_limit_leaves_every_bit() -> None:
    some = parameters([0.1, 0.2], [0.3])
    before = gradients(some)
    clip_gradients(some, 10.0)
    assert gradients(some) == before


def test_the_scale_comes_first() -> None:
    some = parameters([3.0], [4.0])
    norm = clip_gradients(some, None, torch.tensor(2.0, dtype=torch.float64))
    assert norm.item() == 10.0
    assert gradients(some) == [[6.0], [8.0]]
    norm = clip_gradients(some, 5.0, torch.tensor(0.5, dtype=torch.float64))
    assert norm.item() == 5.0
    assert gradients(some) == [[pytest.approx(3.0, rel=1e-6)], [pytest.approx(4.0, rel=1e-6)]]


def test_what_has_no_gradient_is_passed_over() -> None:
    some = parameters([3.0], [4.0])
    some[0].grad = None
    assert clip_gradients(some, 1.0).item() == 4.0
    assert gradients(some)[0] is None
    assert clip_gradients(some[:1], 1.0).item() == 0.0
    assert clip_gradients([], None).item() == 0.0


def test_zero_gradients_stay_zero() -> None:
    some = parameters([0.0, 0.0])
    assert clip_gradients(some, 1.0).item() == 0.0
    assert gradients(some) == [[0.0, 0.0]]


def test_squares_of_low_types_are_summed_in_float32() -> None:
    """In bfloat16 a sum of 4096 ones stops at 256; in float16 the square of 300 is infinite."""
    (ones,) = parameters([1.0] * 4096, dtype=torch.bfloat16)
    assert clip_gradients([ones], None).item() == 64.0
    (large,) = parameters([300.0, 400.0], dtype=torch.float16)
    assert clip_gradients([large], None).item() == 500.0


def test_what_is_not_finite_is_seen() -> None:
    assert math.isnan(clip_gradients(parameters([1.0], [math.nan]), 1.0).item())
    assert math.isinf(clip_gradients(parameters([1.0], [math.inf]), None).item())


WHOLE = [torch.arange(1.0, 22.0).reshape(7, 3), torch.arange(10.0).sqrt().reshape(5, 2), torch.tensor(3.0)]


def clip_spread(max_norm: float | None) -> Any:
    """One gradient cut over both axes, one over one, one whole; 7 and 5 rows are not divided by 2 or 4."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    places: list[list[Placement] | None] = [[Replicate(), Shard(0)], [Shard(0), Replicate()], None]
    some: list[torch.Tensor] = []
    for whole, placements in zip(WHOLE, places, strict=True):
        value = whole.double()
        spread = value if placements is None else distribute_tensor(value, mesh, placements)
        parameter = nn.Parameter(torch.zeros_like(spread))
        parameter.grad = spread
        some.append(parameter)
    norm = clip_gradients(some, max_norm)
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in some]
    return norm.item(), found


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("max_norm", [None, 3.0])
def test_parts_count_once_wherever_they_lie(pool: Pools, world_size: int, max_norm: float | None) -> None:
    alone = parameters(*(whole.double() for whole in WHOLE))
    expected = clip_gradients(alone, max_norm).item()
    for norm, found in pool(world_size).run(clip_spread, max_norm):
        assert norm == pytest.approx(expected, rel=1e-14)
        for part, parameter in zip(found, alone, strict=True):
            assert parameter.grad is not None
            assert torch.allclose(part, parameter.grad, rtol=1e-13)


def clip_empty() -> float:
    """One row over three ranks: two of them hold nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = nn.Parameter(torch.zeros_like(distribute_tensor(torch.tensor([[3.0, 4.0]]), mesh, [Shard(0)])))
    parameter.grad = distribute_tensor(torch.tensor([[3.0, 4.0]]), mesh, [Shard(0)])
    return clip_gradients([parameter], 1.0).item()


@pytest.mark.distributed
def test_a_rank_without_elements_takes_part(pool: Pools) -> None:
    assert pool(3).run(clip_empty) == [5.0] * 3


def clip_unsummed(max_norm: float) -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", None)
        return float(clip_spread(max_norm)[0])


@pytest.mark.distributed
def test_every_copy_adds_in_the_order_of_ranks(pool: Pools) -> None:
    """NCCL's sums follow each group's own ring: copies would clip by factors that differ in the last bit."""
    assert len(set(pool(4).run(clip_unsummed, 3.0))) == 1
