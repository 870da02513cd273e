"""The pictures of the collectives show what the real calls do."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pools
from tools.pictures import COLLECTIVES, draw


def call(name: str) -> list[int]:
    """In a worker: what this rank has after the real call, with the numbers of the picture."""
    collective, rank = COLLECTIVES[name], dist.get_rank()
    given = torch.tensor(collective.before[rank] or [0] * len(collective.before[0]), dtype=torch.int64)
    got: Any = given.clone()
    if name == "broadcast":
        dist.broadcast(got, 0)
    elif name == "all-reduce":
        dist.all_reduce(got)
    elif name == "gather":
        parts = [torch.empty_like(given) for _ in range(3)] if rank == 0 else None
        dist.gather(given, parts, dst=0)
        got = torch.cat(parts) if parts else torch.empty(0)
    elif name == "all-gather":
        parts = [torch.empty_like(given) for _ in range(3)]
        dist.all_gather(parts, given)
        got = torch.cat(parts)
    elif name == "reduce-scatter":
        got = torch.empty(1, dtype=torch.int64)
        dist.reduce_scatter(got, list(given.split(1)))
    elif name == "all-to-all":
        dist.all_to_all_single(got, given)
    else:
        dist.barrier()
        got = torch.empty(0)
    found: list[int] = got.tolist()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_picture_shows_what_the_real_call_does(pool: Pools, name: str) -> None:
    assert pool(3).run(call, name) == [list(after) for after in COLLECTIVES[name].after]


def test_it_is_drawn_with_its_numbers() -> None:
    picture = draw("all-to-all")
    assert 'aria-label="all-to-all: every rank gives a part to every rank"' in picture
    assert all(f">{'  '.join(map(str, row))}<" in picture for row in COLLECTIVES["all-to-all"].after)
    assert draw("gather").count(">nothing<") == 2
