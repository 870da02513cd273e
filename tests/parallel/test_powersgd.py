"""PowerSGD: what has a low rank already passes exactly, what is not sent is sent later, what is small travels whole."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from allranks.parallel.powersgd import PowerSGD
from allranks.parameter_map import Box, Entry
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed


def gradient_of(rank: int, shape: tuple[int, ...], ranks: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if ranks is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    left, right = (torch.randn(n, ranks, generator=generator.manual_seed(7), dtype=torch.float64) for n in shape)
    return (left @ right.T) * (1 + rank)


def reduce_all(shape: tuple[int, ...], rank: int, low: int | None, steps: int) -> Any:
    """The same gradient again and again: what was received, this rank's error, and the bytes."""
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    power = PowerSGD({"w": parameter}, rank, dist.group.WORLD)
    received = []
    for _ in range(steps):
        gradient = gradient_of(dist.get_rank(), shape, low)
        power.reduce([parameter], [gradient])
        received.append(gradient.clone())
    entry = Entry("w", shape, "float64", Box.whole(shape), tuple(range(dist.get_world_size())))
    return torch.stack(received), power.parts({"w": entry}), (power.whole_bytes, power.sent_bytes)


def test_a_matrix_of_that_rank_passes_exactly(pool: Pools) -> None:
    for received, _, (whole, sent) in pool(2).run(reduce_all, (20, 30), 2, 2, 1):
        torch.testing.assert_close(received[0], gradient_of(0, (20, 30), 2) * 1.5, rtol=1e-10, atol=1e-12)
        assert (whole, sent) == (8 * 20 * 30, 8 * 2 * (20 + 30))


def test_what_is_not_sent_is_kept_and_sent_later(pool: Pools) -> None:
    shape, steps = (20, 30), 40
    ranks = pool(3).run(reduce_all, shape, 2, None, steps)
    mean = torch.stack([gradient_of(rank, shape) for rank in range(3)]).mean(0)
    received = ranks[0][0]
    assert all(torch.equal(other, received) for other, _, _ in ranks), "all take the same for the mean"
    assert not torch.allclose(received[0], mean, rtol=0.1)
    # Whatever was given was received, but for what the ranks still keep.
    kept = torch.stack([parts[0][1][0] for _, parts, _ in ranks]).mean(0)
    torch.testing.assert_close(received.sum(0) + kept, mean * steps, rtol=1e-12, atol=1e-12)
    error = (received.mean(0) - mean).norm() / mean.norm()
    assert error < 0.5 * (received[0] - mean).norm() / mean.norm()


def test_its_state_has_names_in_a_checkpoint(pool: Pools) -> None:
    for rank, (_, parts, _) in enumerate(pool(2).run(reduce_all, (20, 3, 10), 2, None, 1)):
        (error, own), (factor, q) = parts
        assert error.name == "optimizer.powersgd_error.w@each" and factor.name == "optimizer.powersgd_q.w"
        assert (error.shape, error.box, error.holders) == (
            (2, 20, 3, 10),
            Box((rank, 0, 0, 0), (1, 20, 3, 10)),
            (rank,),
        )
        assert own.shape == (1, 20, 3, 10) and own.abs().max() > 0
        assert factor.shape == tuple(q.shape) == (30, 2) and factor.holders == (0, 1)


@pytest.mark.parametrize("shape", [(7, 3), (40,), ()])
def test_what_would_not_be_smaller_travels_whole(pool: Pools, shape: tuple[int, ...]) -> None:
    for received, parts, (whole, sent) in pool(2).run(reduce_all, shape, 4, None, 1):
        mean = (gradient_of(0, shape) + gradient_of(1, shape)) / 2
        assert torch.equal(received[0], mean) and parts == [] and whole == sent


def nothing_then_something() -> torch.Tensor:
    """A parameter that nothing has reached for some steps."""
    parameter = nn.Parameter(torch.zeros(20, 30))
    power = PowerSGD({"w": parameter}, 2, dist.group.WORLD)
    for _ in range(3):
        power.reduce([parameter], [torch.zeros(20, 30)])
    received = torch.zeros(20, 30)
    for _ in range(2):
        gradient = gradient_of(0, (20, 30), 2).float()
        power.reduce([parameter], [gradient])
        received += gradient
    return received


def test_it_recovers_from_gradients_of_zero(pool: Pools) -> None:
    for found in pool(2).run(nothing_then_something):
        torch.testing.assert_close(found, 2 * gradient_of(0, (20, 30), 2).float(), rtol=1e-3, atol=1e-3)
