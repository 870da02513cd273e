"""A batch that all data-parallel ranks take from the first one, and whether theirs are built like it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.spread import Spread
from allranks.training.own.same_batch import is_alike, share_batch
from tests.distributed.pool import Pools

pytestmark = pytest.mark.distributed


def test_a_batch_of_any_type_is_shared(pool: Pools) -> None:
    """Neither NCCL nor gloo sends integers of 16 bits."""

    def case() -> list[Any]:
        rank = dist.get_rank()
        mesh = SimpleNamespace(data_group=dist.group.WORLD, rank=rank)
        batch = {
            "levels": torch.tensor([[1, -2], [3, 4]], dtype=torch.int16)[: 2 - rank],
            "tokens": torch.tensor([65000, rank, 1], dtype=torch.uint16)[::2],
            "flags": torch.tensor([rank == 0, True]),
            "scale": torch.tensor(0.5 - rank, requires_grad=True),
            "none": torch.zeros(0, 3 + rank),
            "word": "one",
        }
        shared = share_batch(batch, cast(Spread, SimpleNamespace(mesh=mesh, device=torch.device("cpu"))))
        return [value.tolist() if isinstance(value, torch.Tensor) else value for value in shared.values()]

    assert pool(2).run(case) == [[[[1, -2], [3, 4]], [65000, 1], [True, True], 0.5, [], "one"]] * 2


def test_ranks_agree_on_whether_batches_are_built_alike(pool: Pools) -> None:
    def case() -> list[bool]:
        rank = dist.get_rank()
        mesh = SimpleNamespace(data_group=dist.group.WORLD, rank=rank)
        spread = cast(Spread, SimpleNamespace(mesh=mesh, device=torch.device("cpu")))
        one = torch.zeros(2 + rank, 3)
        pairs: list[Any] = [
            ((one,), {"scale": 2.0}),
            ((one,), {"scale": 2.0 + rank}),
            ((one.double() if rank else one,), {}),
            ((one,) * (1 + rank), {}),
        ]
        return [is_alike(pair, spread) for pair in pairs]

    assert pool(2).run(case) == [[True, False, False, False]] * 2
