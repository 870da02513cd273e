"""A world of any size in one process, which leaves nothing behind."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from allranks.errors import ConfigError
from allranks.layout import Layout
from allranks.parallel import expert
from allranks.parallel.mesh import build_mesh
from allranks.profiling.fakes import fake_mode
from allranks.rehearsing.rank_step import environment_of
from allranks.rehearsing.world import fake_world, launched_as
from allranks.stepping import alternating, spikes


def test_the_environment_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    before = dict(os.environ)
    with launched_as(environment_of(37, 64, 8)):
        told = {name: os.environ[name] for name in os.environ if os.environ[name] != before.get(name)}
    assert told == {
        "RANK": "37",
        "LOCAL_RANK": "5",
        "GROUP_RANK": "4",
        "WORLD_SIZE": "64",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_WORLD_SIZE": "8",
    }
    assert dict(os.environ) == before


def test_a_rank_of_many() -> None:
    before = DeviceMesh.__dict__["mesh"], expert.count_rows, dist.get_backend
    with fake_world(37, 64, "nccl"):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (37, 64, "nccl")
        mesh = build_mesh(Layout(dp_shard=8, tp=8), "cpu")
        with fake_mode():
            assert (mesh.coordinate("dp_shard"), mesh.coordinate("tp")) == (4, 5)
            assert mesh.peers(("dp_shard",)) == tuple(range(32, 40))
            gathered = torch.zeros(64)
            dist.all_reduce(gathered)
    assert not dist.is_initialized()
    assert (DeviceMesh.__dict__["mesh"], expert.count_rows, dist.get_backend) == before


def test_other_ranks_have_what_this_one_has() -> None:
    with fake_world(0, 4, "gloo"):
        group = dist.group.WORLD
        assert group is not None
        assert alternating.add_up([16.0, 1.0, 0.0], group) == [64.0, 4.0, 0.0]
        on_any_rank = vars(spikes)["on_any_rank"]
        assert [on_any_rank(flag, torch.device("cpu"), group) for flag in (True, False)] == [True, False]
        assert on_any_rank(True, torch.device("cpu"), None)


def test_what_fails_is_told_once() -> None:
    """Torch's own log of a shape that does not fit is silent: the error has it all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with fake_world(0, 1, "gloo"):
        assert log.disabled
    assert not log.disabled


def test_one_world_at_a_time() -> None:
    with fake_world(0, 2, "gloo"), pytest.raises(ConfigError, match="a world of its own"), fake_world(0, 2, "gloo"):
        pass
    assert not dist.is_initialized()


def test_every_expert_gets_as_many_tokens() -> None:
    with fake_world(0, 1, "gloo"):
        sent, received = expert.count_rows(torch.empty(10, 3), torch.empty(4, 2), torch.empty(4, 2))
    assert sent == received == [3, 3, 2, 2]
