"""Whether the hosts have the memory for copies to write from: every rank hears the same."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from allranks.training import stage_room
from allranks.training.stage_room import find_shortage
from tests.distributed.pool import Pools

CPU = torch.device("cpu")


def alone(num_bytes: int) -> str:
    processes: Any = SimpleNamespace(host=None, world_group=None, device=CPU)
    return find_shortage([num_bytes], processes)


def test_so_much_of_what_is_free_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_room, "free_host_bytes", lambda: 1000)
    assert alone(900) == ""
    assert alone(901).startswith("a copy of what the 1 processes of ")
    assert alone(901).endswith(" write takes 901 B, and 1.0 kB of its memory are free")


@pytest.mark.distributed
def test_the_ranks_of_a_host_count_together_and_one_host_speaks_for_all(pool: Pools) -> None:
    """Three ranks on two hosts, of which the second has too little for the two that it has."""

    def case() -> str:
        hosts = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
        rank = dist.get_rank()
        cpu = torch.device("cpu")
        processes: Any = SimpleNamespace(host=hosts[rank > 0], world_group=dist.group.WORLD, device=cpu)
        with mock.patch("allranks.training.stage_room.free_host_bytes", lambda: 1000):
            assert find_shortage([800, 400, 400], processes) == ""
            return find_shortage([800, 500, 500], processes)

    told = pool(3).run(case)
    assert len(set(told)) == 1 and "the 2 processes of " in told[0] and "takes 1.0 kB" in told[0]
