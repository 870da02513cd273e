"""Functions of a forward in which ranks part, and some in which they only seem to."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from tests.rehearsing.tasks import Calling, Layered


def calling(way: Callable[[torch.Tensor], torch.Tensor]) -> Layered:
    """Calls a function in its middle, in which ranks part."""

    class Parting(Layered):
        def middle(self) -> nn.Module:
            return Calling(way)

    return Parting()


def by_environment(value: torch.Tensor) -> torch.Tensor:
    """Asks the environment which rank it is."""
    if os.environ["RANK"] == "0":
        dist.all_reduce(value.detach().clone())
    return value


def by_barrier(value: torch.Tensor) -> torch.Tensor:
    """Rank 0 waits for nobody."""
    if dist.get_rank() == 0:
        dist.barrier()
    return value


def by_size(value: torch.Tensor) -> torch.Tensor:
    """The last rank gathers fewer numbers."""
    mine = torch.zeros(8 if dist.get_rank() == 3 else 16)
    dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
    return value


def by_type(value: torch.Tensor) -> torch.Tensor:
    """The last rank sums another type of as many bytes."""
    dist.all_reduce(torch.zeros(16, dtype=torch.float32 if dist.get_rank() == 3 else torch.int32))
    return value


def by_root(value: torch.Tensor) -> torch.Tensor:
    """Every rank sends to the others."""
    dist.broadcast(value.detach().clone(), src=dist.get_rank())
    return value


def by_rows(value: torch.Tensor) -> torch.Tensor:
    """Gathers rows, of which ranks have unequal numbers."""
    dist.all_gather([torch.empty_like(value) for _ in range(dist.get_world_size())], value.detach())
    return value


def in_pairs(value: torch.Tensor) -> torch.Tensor:
    """The first half of the ranks sums in its own group, and rank 0 sends to rank 1."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() < 2:
        dist.all_reduce(value.detach().clone(), group=pairs[0])
    if dist.get_rank() == 0:
        dist.send(value.detach(), 1)
    return value


def apart(value: torch.Tensor) -> torch.Tensor:
    """Of a pair only one sums."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if dist.get_rank() == 3:
        dist.all_reduce(value.detach().clone(), group=pairs[1])
    return value
