"""The processes of a run as one value, and what rank 0 tells the others."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from allranks.data.random_keys import cuda_devices
from allranks.launching.environment import ALONE, ProcessEnvironment
from allranks.layout import Layout
from allranks.parallel.backend import DeviceChoice
from allranks.parallel.waiting import wait_alike, wait_of_world
from allranks.stepping.world import gather_processes
from tests import fake_cuda
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, processes_of

CPU = DeviceChoice(torch.device("cpu"), "gloo", None, ())
VALUE = {"path": "/a/ünïcode\n" * 300, "list": [1, 2.5, None, True], "nothing": {}}


def test_one_process_is_a_world_without_groups() -> None:
    processes = gather_processes(ALONE, CPU, Layout.resolve(config_of("single").layout, 1))
    assert (processes.rank, processes.size, processes.device.type) == (0, 1, "cpu")
    assert processes.agreement is processes.host is processes.data_group is None
    assert processes.share(VALUE) is VALUE
    processes.barrier()
    source = processes.host_source()
    assert (source.group, source.leader, source.leads) == (None, 0, True)


def test_the_devices_of_a_process_are_those_that_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.put_in(monkeypatch, 4)
    layout = Layout.resolve(config_of("single").layout, 1)
    one, two = torch.device("cuda", 1), torch.device("cuda", 2)
    several = DeviceChoice(two, "gloo", None, (), beside=(one,))
    assert gather_processes(ALONE, several, layout).devices == (two, one)
    assert cuda_devices() == (2, 1)
    assert gather_processes(ALONE, CPU, layout).devices == (torch.device("cpu"),)
    assert cuda_devices() == (0,), "a later world has its own"


def ask_around(local_size: int) -> dict[str, Any]:
    """In a worker, `local_size` of which are on a host."""
    processes = processes_of(config_of("ddp"), local_size)
    heard = processes.share(VALUE if processes.rank == 0 else "what others say does not matter")
    processes.barrier()
    assert processes.host is not None and processes.agreement is not None
    here, first = processes.host_source(), processes.first_source()
    return {
        "heard": heard == VALUE,
        "empty": processes.share({}),
        "host": dist.get_process_group_ranks(processes.host),
        "agreement": dist.get_process_group_ranks(processes.agreement),
        "of its own": processes.agreement is not dist.group.WORLD,
        "source": (here.leader, here.leads),
        "first": (first.leader, first.leads),
    }


@pytest.mark.distributed
@pytest.mark.parametrize("local_size", [4, 2, 3, 1])
def test_a_world_of_hosts(pool: Pools, local_size: int) -> None:
    for rank, found in enumerate(pool(4).run(ask_around, local_size)):
        leader = rank - rank % local_size
        assert found == {
            "heard": True,
            "empty": {},
            "host": list(range(leader, min(4, leader + local_size))),
            "agreement": [0, 1, 2, 3],
            "of its own": True,
            "source": (leader, rank == leader),
            "first": (0, rank == 0),
        }


def waits_of_groups() -> set[float]:
    """In a worker whose world waits for 333 s: for how long the groups of a run do."""
    own = wait_of_world()
    assert own is not None
    try:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=333))
        processes = processes_of(config_of("dp_replicate=2,dp_shard=2"), 2)
        groups = [processes.agreement, processes.host, processes.mesh.group("dp_shard"), dist.group.WORLD]
        backends: list[Any] = [one._get_backend(torch.device("cpu")) for one in groups if one is not None]
        assert len(set(map(id, backends))) == 4
        return {one.options._timeout.total_seconds() for one in backends}
    finally:
        dist.distributed_c10d._set_pg_timeout(own)
        wait_alike()


@pytest.mark.distributed
def test_all_groups_wait_as_long_as_the_world(pool: Pools) -> None:
    """torch's own ten or thirty minutes end ranks that wait for what the guard allows."""
    assert pool(4).run(waits_of_groups) == [{333.0}] * 4


def go_round() -> tuple[list[int], int]:
    """In a worker: ranks go round the hosts, as `srun --distribution=cyclic` places them, and hosts differ in size."""
    rank = dist.get_rank()
    environment = ProcessEnvironment(
        "slurm",
        rank,
        local_rank=rank // 2,
        world_size=3,
        local_world_size=2 - rank % 2,
        node_rank=rank % 2,
        num_nodes=2,
    )
    processes = gather_processes(environment, CPU, Layout.resolve(config_of("ddp").layout, 3))
    assert processes.host is not None
    return dist.get_process_group_ranks(processes.host), processes.host_source().leader


@pytest.mark.distributed
def test_ranks_may_go_round_hosts_of_unequal_size(pool: Pools) -> None:
    assert pool(3).run(go_round) == [([0, 2], 0), ([1], 1), ([0, 2], 0)]
