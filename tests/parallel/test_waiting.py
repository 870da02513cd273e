"""How long a rank waits in a collective."""

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from allranks.parallel.waiting import wait_alike, wait_of_world
from tests.distributed.pool import Pools


def waits(group: Any) -> timedelta:
    backend = group._get_backend(torch.device("cpu"))
    found: timedelta = backend.options._timeout
    return found


@pytest.mark.distributed
def test_a_group_of_its_own_waits_as_the_world_does(pool: Pools) -> None:
    def case() -> bool:
        group, world = dist.new_group(timeout=timedelta(seconds=5)), wait_of_world()
        before = waits(group)
        wait_alike()
        return before == timedelta(seconds=5) and waits(group) == world == waits(dist.group.WORLD)

    assert pool(2).run(case) == [True, True]


@pytest.mark.distributed
def test_a_world_that_does_not_tell_changes_nothing(pool: Pools) -> None:
    def case() -> tuple[timedelta | None, timedelta]:
        group = dist.new_group(timeout=timedelta(seconds=5))
        with patch.object(dist.ProcessGroup, "_get_backend", lambda *_: None):
            wait_alike()
            untold = wait_of_world()
        return untold, waits(group)

    assert pool(2).run(case) == [(None, timedelta(seconds=5))] * 2
