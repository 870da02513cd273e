"""Models that fully_shard spreads over all ranks, and what their modules are given."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from allranks.verifying.given import is_sharded_over_all, noting_given
from tests.distributed.pool import Pools


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def spread() -> dict[str, bool]:
    """Which ways of spreading a model count, on each of two ranks."""
    size = dist.get_world_size()
    line, plane = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    sharded, tensor, both, half = net(), net(), net(), net()
    fully_shard(sharded, mesh=line)
    parallelize_module(tensor, line, {"0": ColwiseParallel()})
    parallelize_module(both, plane["tp"], {"0": ColwiseParallel()})
    fully_shard(both, mesh=plane["dp"])
    fully_shard(half[0], mesh=line)
    parallelize_module(half, line, {"2": ColwiseParallel()})
    models = {"whole": net(), "sharded": sharded, "tensor": tensor, "both": both, "half": half}
    return {name: is_sharded_over_all({"": model}, size) for name, model in models.items()}


@pytest.mark.distributed
def test_only_fully_shard_over_all_ranks_counts(pool: Pools) -> None:
    for told in pool(2).run(spread):
        assert told == {"whole": False, "sharded": True, "tensor": False, "both": False, "half": False}


def test_what_modules_are_given() -> None:
    model, x = net(), torch.randn(3, 4)

    def given(batch: Any) -> list[int]:
        found: list[int] = []
        with noting_given({"": model}, found):
            model(batch)
        return found

    first = given(x)
    assert len(first) == 4 and given(x) == first
    assert given(x[[2, 0, 1]])[0] == first[0], "the order of samples is no difference"
    assert given(x[:2])[0] != first[0]
    found: list[int] = []
    with noting_given({"": model}, found):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    assert given(x) == first
