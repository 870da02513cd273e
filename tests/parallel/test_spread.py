"""What parallelize returns: names, parts, and when gradients are reduced."""

import importlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import profile

from allranks.layout import Layout
from tests.distributed.pool import Pools
from tests.distributed.tasks import MODELS
from tests.parallel.spreads import spread

module: Any = importlib.import_module("allranks.parallel.spread")
averages: Any = importlib.import_module("allranks.parallel.average")


def test_trainable_names_each_tied_one_once() -> None:
    found = spread(MODELS["tied"])
    assert "embedding.weight" in found.trainable()
    assert "head.weight" not in found.trainable()
    assert found.map["head.weight"].alias_of == "embedding.weight"
    frozen = spread(MODELS["frozen"]).trainable()
    assert not any(name.startswith(("first", "blocks.1", "steps")) for name in frozen)
    assert "blocks.0.gain" in frozen


def test_trainable_of_one_of_several() -> None:
    found = spread(lambda: {"g": nn.Linear(2, 2), "gg": nn.Linear(2, 1)})
    assert list(found.trainable("g")) == ["g.weight", "g.bias"]
    assert list(found.trainable()) == ["g.weight", "g.bias", "gg.weight", "gg.bias"]


def test_local_shares_the_memory() -> None:
    found = spread(lambda: nn.Linear(2, 2))
    found.local("weight").fill_(7.0)
    assert found.modules[""].weight.eq(7.0).all()  # type: ignore[operator]
    assert not found.local("weight").requires_grad


def accumulate(layout: Layout, num_micro_steps: int) -> dict[str, int]:
    """The collectives of one step of micro-steps, gradients included."""
    found = spread(MODELS["scalars"], layout)
    x = torch.ones(2, 5)
    with profile(acc_events=True) as profiled:
        for micro_step in range(num_micro_steps):
            found.synchronise(last=micro_step == num_micro_steps - 1)
            found.modules[""](x).sum().backward()
        found.reduce_scalars()
    names = (event.name for event in profiled.events() or () if event.name.startswith("c10d::"))
    return dict(Counter(name.removeprefix("c10d::") for name in names))


@pytest.mark.distributed
def test_accumulation_does_not_synchronise_what_it_need_not(pool: Pools) -> None:
    units = 4  # three blocks and the root
    for layout in (Layout(dp_replicate=2), Layout(dp_replicate=2, sharding="none")):
        once, thrice = (pool(2).run(accumulate, layout, num)[0] for num in (1, 3))
        assert once == thrice
        assert once["allreduce_"] == (1 if layout.replicated else units + 1)  # + the scalars
    hybrid = Layout(dp_replicate=2, dp_shard=2)
    once, thrice = (pool(4).run(accumulate, hybrid, num)[0] for num in (1, 3))
    assert thrice["alltoall_base_"] == 3 * once["alltoall_base_"] == 3 * units
    assert thrice["allreduce_"] == once["allreduce_"] == units + 2  # + the scalars over both axes


def average() -> list[float | None]:
    """Rank r's scalars have gradients r + 1 and, on rank 1 only, 5."""
    found = spread(MODELS["scalars"], Layout(dp_shard=3))
    first, second = found._scalars
    first.grad = torch.tensor(float(dist.get_rank() + 1))
    second.grad = torch.tensor(5.0) if dist.get_rank() == 1 else None
    found.reduce_scalars()
    return [None if scalar.grad is None else scalar.grad.item() for scalar in (first, second)]


@pytest.mark.distributed
def test_scalars_are_averaged_over_all_ranks(pool: Pools) -> None:
    assert pool(3).run(average) == [[2.0, pytest.approx(5 / 3)]] * 3


def align(gpu: bool, together: int) -> dict[str, tuple[bool, list[float], list[float]]]:
    """Of each parameter under tp: whether it is cut; its gradient before and after, which rank 1 has added to."""
    found = spread(MODELS["transformer"], Layout(tp=2))
    parameters = found.trainable()
    before = {}
    for name in parameters:
        local = found.local(name)
        parameters[name].grad = torch.zeros_like(parameters[name])
        gradient: Any = parameters[name].grad
        part = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        part.copy_(torch.arange(float(local.numel())).view(local.shape) + dist.get_rank() / 7)
        before[name] = part.flatten().tolist()
    with patch.object(module, "is_gpu", lambda _: gpu), patch.object(averages, "TOGETHER", together):
        found.reduce_scalars()
    after = {name: read(parameters[name]) for name in parameters}
    return {
        name: (found.map[name].placements.get("tp", "replicate") != "replicate", before[name], after[name])
        for name in after
    }


def read(parameter: torch.Tensor) -> list[float]:
    gradient: Any = parameter.grad
    values: list[float] = (gradient._local_tensor if isinstance(gradient, DTensor) else gradient).flatten().tolist()
    return values


@pytest.mark.distributed
@pytest.mark.parametrize(("gpu", "together"), [(False, 1), (True, 1), (True, 1 << 18)])
def test_what_tp_leaves_whole_has_one_gradient_where_kernels_add_in_any_order(
    pool: Pools, gpu: bool, together: int
) -> None:
    first, second = pool(2).run(align, gpu, together)
    cut = [name for name, (is_cut, *_) in first.items() if is_cut and first[name][1] != second[name][1]]
    for name, (is_cut, before, after) in second.items():
        assert first[name][2] == first[name][1]
        taken = gpu and not is_cut
        assert after == (first[name][2] if taken else before), name
    assert 0 < len(cut) < len(first)
