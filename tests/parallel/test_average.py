"""The mean of gradients over ranks."""

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.average import average_gradients
from tests.distributed.pool import Pools


def averaged() -> list[torch.Tensor | None]:
    """In a worker: gradients of two dtypes, one of which only the first rank has."""
    rank = dist.get_rank()
    parameters = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(())]
    parameters[0].grad = torch.full((3,), rank + 1.0)
    parameters[1].grad = torch.arange(4.0, dtype=torch.float64).reshape(2, 2).T * (rank + 1)
    if rank == 0:
        parameters[2].grad = torch.tensor(6.0)
    average_gradients(parameters, None, 3)
    return [parameter.grad for parameter in parameters]


@pytest.mark.distributed
def test_sums_over_the_ranks_divided_once(pool: Pools) -> None:
    for first, second, third in pool(3).run(averaged):
        assert first is not None and first.tolist() == [2.0, 2.0, 2.0]
        assert second is not None and second.tolist() == [[0.0, 4.0], [2.0, 6.0]]
        assert third is not None and third.item() == 2.0
