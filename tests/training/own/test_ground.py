"""What a world stands on: layout, precision and device out of arguments and environment."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import allranks
from allranks.errors import ConfigError
from allranks.parallel import allocator
from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ProcessEnvironment
from allranks.training.own import ground
from tests.distributed.pool import Pools
from tests.training.own.cases import Net


def test_the_layout_of_a_launch_is_taken_where_join_is_given_none(pool: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(layout: str | None) -> str:
        import os

        os.environ |= {"ALLRANKS_AGENT": "1", "ALLRANKS_LAYOUT": "dp_shard=2"}
        with allranks.join(layout=layout) as world:
            return repr(world)

    assert pool(2).run(case, None)[1] == "<World rank 1 of 2 on cpu, layout dp_shard=2>"
    assert pool(2).run(case, "ddp")[0] == "<World rank 0 of 2 on cpu, layout dp_replicate=2>"


def test_a_group_of_another_world_is_refused(pool: Pools) -> None:
    def case() -> None:
        import os

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        allranks.join()

    with pytest.raises(
        ConfigError, match=r"runs here as rank [01] of 2, but the environment \(torchrun\) says rank 0 of 1"
    ):
        pool(2).run(case)


def test_the_device_is_taken_where_the_script_has_started_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch's sharding would put every rank's parameters on the first GPU; the allocator is the script's."""
    told: list[Any] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(allocator, "keep_heap", lambda: told.append("heap"))
    environment = ProcessEnvironment("torchrun", 3, 3, 4, 4, master_addr="127.0.0.1", master_port=29500)
    for device in ("cuda:3", "cpu"):
        assert not ground._start(environment, DeviceChoice(torch.device(device), "gloo", None, ()), 600.0)
    assert told == [torch.device("cuda:3")]


def test_a_batch_is_placed_in_the_precision() -> None:
    batch = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int64)]}
    for precision, expected in (("float32", torch.float32), ("float64", torch.float64)):
        with allranks.join(precision=precision) as world:
            placed = world._ground.place(batch)
            assert (placed["x"].dtype, placed["y"][0].dtype) == (expected, torch.int64)
            model = world.parallelize(Net().double() if precision == "float32" else Net())
            assert {parameter.dtype for parameter in model.parameters()} == {expected}


def test_after_an_error_a_process_among_several_stays_in_its_world(pool: Pools) -> None:
    def case() -> list[str]:
        found = []
        for _ in range(2):
            try:
                with allranks.join():
                    raise ValueError("the user's")
            except (ValueError, ConfigError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    for rank, found in enumerate(pool(2).run_alone(case, timeout=120)):
        assert found[0] == "ValueError: the user's"
        assert found[1].startswith(f"ConfigError: join() in a process that is <World rank {rank} of 2")
