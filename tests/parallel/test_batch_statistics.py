"""Batch normalisation over several ranks, beside torch's own over all of their rows."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from allranks.parallel.batch_statistics import normalise
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed

CHANNELS = 4
EPS = 1e-3


def rows_of(rank: int, number: int, shape: tuple[int, ...] = (5,), mean: float = 0.0) -> torch.Tensor:
    """This rank's samples: each rank's have another mean, so that a mean of means is another."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(number, CHANNELS, *shape, generator=generator, dtype=torch.float64) * (rank + 1) + rank + mean


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    weight, bias = (torch.rand(CHANNELS, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    return {"weight": weight, "bias": bias}


def pulled(output: torch.Tensor) -> torch.Tensor:
    """A loss that is no function of the normalised values' own statistics: a sum over samples."""
    return (torch.tanh(output) * torch.linspace(1, 2, CHANNELS).view(-1, *[1] * (output.ndim - 2))).square().sum()


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def over_ranks(parts: list[torch.Tensor], aside: tuple[int, ...]) -> Any:
    """In a worker: its output, running statistics, and gradients of rows and parameters."""
    rank = dist.get_rank()
    rows, given = parts[rank].clone().requires_grad_(), parameters()
    mean, var = torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)
    counts = rank not in aside
    noted = list[str]()
    how: dict[str, Any] = {"group": world(), "counts": counts, "note": lambda: noted.append("together"), **given}
    output = normalise(rows, mean, var, momentum=0.3, eps=EPS, **how)
    (pulled(output) * counts).backward()
    assert noted == ["together"] * 2, "once in the forward, once in the backward"
    return output.detach(), mean, var, rows.grad, given["weight"].grad, given["bias"].grad


@pytest.mark.parametrize(
    ("numbers", "shape", "aside"),
    [
        ((2, 3, 2), (5,), ()),
        ((1, 4, 2), (), ()),
        ((2, 1, 3), (3, 2), ()),
        ((3, 2, 2), (2, 1, 2), (1,)),
        ((2, 2, 1), (5,), (0, 2)),
        ((1, 0, 1), (), ()),
        ((1, 1, 2), (), (2,)),
    ],
)
def test_equal_to_one_process_that_has_all_rows(
    pool: Pools, numbers: tuple[int, ...], shape: tuple[int, ...], aside: tuple[int, ...]
) -> None:
    parts = [rows_of(rank, number, shape) for rank, number in enumerate(numbers)]
    found = pool(3).run(over_ranks, parts, aside)
    counted = [rank for rank in range(3) if rank not in aside]
    whole, given = torch.cat([parts[rank] for rank in counted]).requires_grad_(), parameters()
    mean, var = torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)
    output = functional.batch_norm(whole, mean, var, **given, training=True, momentum=0.3, eps=EPS)
    pulled(output).backward()
    close(torch.cat([found[rank][0] for rank in counted]), output.detach())
    close(torch.cat([found[rank][3] for rank in counted]), whole.grad)
    for rank in range(3):
        close(found[rank][1:3], (mean, var))
        assert torch.equal(found[rank][1], found[0][1]) and torch.equal(found[rank][2], found[0][2])
    for index, name in ((4, "weight"), (5, "bias")):
        close(sum(rank[index] for rank in found), given[name].grad)
    for rank in aside:
        assert found[rank][0].isfinite().all() and not found[rank][3].any()


def precise(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Rows far from zero: squares of them say nothing of their variance in float32, let alone below."""
    rows = rows_of(dist.get_rank(), 2 + dist.get_rank(), mean=300.0).to(kind)
    mean, var = torch.zeros(CHANNELS), torch.zeros(CHANNELS)
    output = normalise(rows, mean, var, momentum=1.0, group=world())
    return rows.double(), torch.stack([mean, var]).double(), output.dtype


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_statistics_are_float32_at_least_and_not_differences_of_large_sums(pool: Pools, kind: torch.dtype) -> None:
    found = pool(2).run(precise, kind)
    rows = torch.cat([rows for rows, *_ in found]).transpose(0, 1).flatten(1)
    for _, statistics, dtype in found:
        assert dtype is kind
        torch.testing.assert_close(statistics[0], rows.mean(1), rtol=1e-6, atol=0)
        torch.testing.assert_close(statistics[1], rows.var(1), rtol=1e-5, atol=0)


def refused(numbers: tuple[int, ...], aside: tuple[int, ...], channels: int = CHANNELS) -> Any:
    rank = dist.get_rank()
    mean, var = torch.zeros(channels), torch.ones(channels)
    rows = rows_of(rank, numbers[rank], ()).float()
    try:
        return normalise(rows, mean, var, group=world(), counts=rank not in aside), mean, var
    except ValueError as error:
        return str(error)


def test_one_row_in_all_is_refused_on_every_rank(pool: Pools) -> None:
    expected = "Expected more than 1 value per channel over all ranks when training, got [{}, 4] here"
    assert pool(2).run(refused, (1, 0), ()) == [expected.format(1), expected.format(0)]
    assert pool(2).run(refused, (1, 3), (1,)) == [expected.format(1), expected.format(3)]
    several: Any = pool(2).run(refused, (1, 1), ())
    assert not any(isinstance(one, str) for one in several)


def test_where_every_rank_stands_aside_nothing_is_learnt(pool: Pools) -> None:
    for output, mean, var in pool(2).run(refused, (1, 3), (0, 1)):
        assert output.abs().max() < 10 and not mean.any() and var.eq(1).all()


def test_other_channels_than_the_parameters_have_are_refused(pool: Pools) -> None:
    message = "batch normalisation of 1 channels got an input of [2, 4]"
    assert pool(2).run(refused, (2, 2), (), 1) == [message] * 2


def twice() -> tuple[int, int]:
    """Collectives of a forward, and of its backward."""
    from torch.profiler import profile

    rows = rows_of(dist.get_rank(), 2).requires_grad_()
    with profile(acc_events=True) as forward:
        output = normalise(rows, None, None, group=world())
    with profile(acc_events=True) as backward:
        output.sum().backward()
    one, other = ([e for e in p.events() or () if e.name.startswith("c10d::")] for p in (forward, backward))
    return len(one), len(other)


def test_one_collective_forward_and_one_backward(pool: Pools) -> None:
    assert pool(2).run(twice) == [(1, 1)] * 2
