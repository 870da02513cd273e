"""Rows of all ranks: how many each brings, what they are, and what their gradients are."""

import torch

from allranks.parallel.gather import RanksRows, gather_rows
from tests.distributed.pool import Pools
from tests.training.own.cases import refusal

COUNTS = [2, 0, 3]


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(COUNTS[rank] * 2, dtype=torch.float64).reshape(-1, 2) + 10.0 * (rank + 1)


def test_rows_stand_in_the_order_of_ranks(pool: Pools) -> None:
    def case() -> list[torch.Tensor]:
        import torch.distributed as dist

        rows = rows_of(dist.get_rank())
        kinds = [rows, rows.to(torch.bfloat16), rows.long(), rows > 12, rows[:, 0], rows.t().contiguous().t()]
        return [gather_rows(kind, dist.group.WORLD) for kind in kinds]

    whole = torch.cat([rows_of(rank) for rank in range(3)])
    expected = [whole, whole.to(torch.bfloat16), whole.long(), whole > 12, whole[:, 0], whole]
    for found in pool(3).run(case):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))


def test_a_row_gets_the_gradients_of_all_losses(pool: Pools) -> None:
    def case() -> torch.Tensor:
        import torch.distributed as dist

        rank = dist.get_rank()
        rows = rows_of(rank).requires_grad_()
        gathered = gather_rows(rows, dist.group.WORLD)
        ((rank + 1) * gathered.square().sum() + gathered[0, 0] * rank).backward()
        assert rows.grad is not None
        return rows.grad

    whole = torch.cat([rows_of(rank) for rank in range(3)]).requires_grad_()
    sum((rank + 1) * whole.square().sum() + whole[0, 0] * rank for rank in range(3)).backward()  # type: ignore[union-attr]
    assert whole.grad is not None
    assert torch.equal(torch.cat(pool(3).run(case)), whole.grad)


def test_nobody_has_a_row(pool: Pools) -> None:
    def case() -> list[int]:
        import torch.distributed as dist

        return list(gather_rows(torch.empty(0, 3), dist.group.WORLD).shape)

    assert pool(2).run(case) == [[0, 3], [0, 3]]


def test_rows_of_another_kind_are_refused_everywhere(pool: Pools) -> None:
    def case() -> str:
        import torch.distributed as dist

        return refusal(lambda: gather_rows(torch.zeros(1, 2 + dist.get_rank()), dist.group.WORLD))

    found = pool(2).run(case)
    assert all(text.startswith("TaskError: gather: dtype and dims after the first differ") for text in found)
    assert found[1].endswith("rank 1 has torch.float32(3,)")


def test_one_process_has_all_rows_already() -> None:
    rows = torch.ones(2, 2)
    assert gather_rows(rows, None) is rows
    assert refusal(lambda: gather_rows(torch.ones(()), None)).startswith("TaskError: gather takes rows")


def test_where_a_ranks_rows_begin(pool: Pools) -> None:
    """A filler's rows are nobody's but its own: behind everybody's."""

    def case() -> list[tuple[int, int]]:
        import torch.distributed as dist

        rank, group = dist.get_rank(), dist.group.WORLD
        mine = rows_of(rank)
        worlds = [RanksRows(group), RanksRows(group, counts=rank != 2)]
        found = [(world.offset(mine), world.gather(mine)) for world in worlds]
        assert all(torch.equal(whole[at : at + len(mine)], mine) for at, whole in found)
        return [(at, len(whole)) for at, whole in found]

    assert pool(3).run(case) == [[(0, 5), (0, 2)], [(2, 5), (2, 2)], [(2, 5), (2, 5)]]


def test_a_fillers_rows_get_their_gradient_from_its_own_loss_alone(pool: Pools) -> None:
    def case() -> tuple[torch.Tensor | None, int]:
        import torch.distributed as dist

        rank = dist.get_rank()
        mine = torch.full((2, 1), float(rank + 1), requires_grad=True)
        whole = RanksRows(dist.group.WORLD, counts=rank == 0).gather(mine)
        (whole.sum() * (1.0 if rank == 0 else 0.0)).backward()
        return mine.grad, len(whole)

    (first, two), (second, four) = pool(2).run(case)
    assert (two, four) == (2, 4)
    assert torch.equal(first, torch.ones(2, 1)) and torch.equal(second, torch.zeros(2, 1))
