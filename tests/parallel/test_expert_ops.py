"""Rows that travel between ranks: where they arrive, in what order, and what their gradients do."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.expert_ops import exchange, exchange_counts, order_by_expert
from tests.distributed.pool import Pools

# Row r of rank s is 10 * s + r. Rank 0 has nothing for itself, and rank 2 nothing at all.
SENT = [[0, 2, 1], [1, 1, 1], [0, 0, 0]]


def travel() -> tuple[list[float], list[float], float]:
    """In a worker: the rows that arrive, the gradient of what was sent, and a second derivative's error."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    sent, received = SENT[rank], [row[rank] for row in SENT]
    rows = (10.0 * rank + torch.arange(sum(sent), dtype=torch.float64)).view(-1, 1).requires_grad_()
    found = exchange(rows, group, sent, received)
    (gradient,) = torch.autograd.grad((found.square() * (rank + 1)).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), rows)
    arrived = torch.repeat_interleave(torch.tensor([2.0, 4.0, 6.0]), torch.tensor(sent)).double()
    error = (second.flatten() - arrived).abs().sum()
    return found.flatten().tolist(), gradient.flatten().tolist(), float(error)


@pytest.mark.distributed
def test_rows_arrive_by_rank_and_gradients_go_back(pool: Pools) -> None:
    first, second, third = pool(3).run(travel)
    assert first == ([10.0], [0.0, 4.0, 12.0], 0.0)
    assert second == ([0.0, 1.0, 11.0], [20.0, 44.0, 72.0], 0.0)
    assert third == ([2.0, 12.0], [], 0.0)


def travel_compiled() -> list[float]:
    """In a worker: the gradient of rows that a compiled exchange sends, one to each rank."""
    import torch._dynamo

    group = dist.group.WORLD
    assert group is not None
    rows = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.compile(exchange, backend="eager")(rows, group, [1, 1], [1, 1])
        torch._dynamo.reset()
    (gradient,) = torch.autograd.grad((found * (dist.get_rank() + 1)).sum(), rows)
    return gradient.flatten().tolist()


@pytest.mark.distributed
def test_gradients_go_back_through_a_compiled_exchange(pool: Pools) -> None:
    """torch 2.11's compiler has none for a tensor that was changed in place and returned."""
    assert pool(2).run(travel_compiled) == [[1.0, 2.0]] * 2


def count() -> Any:
    group = dist.group.WORLD
    assert group is not None
    counts = torch.arange(4) + 10 * dist.get_rank()
    return exchange_counts(counts, group).tolist()


@pytest.mark.distributed
def test_each_rank_learns_what_comes_for_its_experts(pool: Pools) -> None:
    assert pool(2).run(count) == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]


def test_rows_of_one_expert_lie_together_by_rank() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 2, 0]])  # rows 0 1 | | 2 and 3 | 4 5 |
    assert order_by_expert(counts, 6).tolist() == [0, 1, 3, 4, 5, 2]
    assert order_by_expert(torch.zeros(2, 3, dtype=torch.int64), 0).tolist() == []
