"""Over gloo other operations do the work of gather and reduce-scatter: to the same values."""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from allranks.parallel.gloo_ops import (
    Exchange,
    exchange_and_sum,
    gather_by_broadcasts,
    gather_through_gloo,
    is_gloo,
)
from allranks.parallel.path import Path
from tests.distributed.pool import Pools


def _beside_gloos_own(extent: int) -> tuple[bool, float, float]:
    """In a worker: whether gathering is equal, and by how much a sum and a mean differ."""
    group = dist.group.WORLD
    assert group is not None
    assert is_gloo(group, "cpu") and not is_gloo(group, "cuda")
    size, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    part = torch.randn(extent, generator=generator, dtype=torch.float64)
    parts = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(parts, part)
    whole = torch.empty(size * extent, dtype=torch.float64)
    work = gather_by_broadcasts(whole, part, group)
    assert work.wait()
    given = torch.randn(size * extent, generator=generator, dtype=torch.float64)
    total, mine, mean = given.clone(), torch.empty_like(part), torch.empty_like(part)
    dist.all_reduce(total)
    exchange_and_sum(mine, given, group, average=False)
    exchange_and_sum(mean, given, group, average=True)
    expected = total[dist.get_rank() * extent :][:extent]
    apart = [float((found - by).abs().sum()) for found, by in ((mine, expected), (mean, expected / size))]
    return torch.equal(whole, torch.cat(parts)), apart[0], apart[1]


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "extent"), [(2, 7), (2, 0), (4, 5)])
def test_the_same_values_as_gloos_own(pool: Pools, world_size: int, extent: int) -> None:
    for equal, of_sum, of_mean in pool(world_size).run(_beside_gloos_own, extent):
        assert equal and of_sum < 1e-12 and of_mean < 1e-12


def _fsdp_beside_its_own() -> list[Any]:
    """In a worker: gradients of a unit that communicates in torch's way, and in ours."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).double()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        for member in (model[0], model):
            fully_shard(member, mesh=mesh)
        if ours:
            gather_through_gloo(model, mesh)
        assert isinstance(model, FSDPModule)
        model(torch.full((2, 5), dist.get_rank() + 1.0, dtype=torch.float64)).square().sum().backward()
        gradients = [p.grad for p in model.parameters()]
        found.append([g.full_tensor() for g in gradients if isinstance(g, DTensor)])
    return found


@pytest.mark.distributed
def test_fsdp_finds_the_same_gradients(pool: Pools) -> None:
    for theirs, ours in pool(2).run(_fsdp_beside_its_own):
        assert len(theirs) == len(ours) == 4
        for one, other in zip(theirs, ours, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _as_on_gpus_over_gloo() -> tuple[list[str], list[float], list[float]]:
    """In a worker: the sums that torch's own reduce-scatter is asked for, and a mean gradient beside the true one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layer = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    fully_shard(layer, mesh=mesh)
    asked: list[str] = []
    own: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives").DefaultReduceScatter
    real = own.__call__

    def reduce_scatter(self: Any, *given: Any, **named: Any) -> Any:
        asked.append(str(named["op"]))
        return real(self, *given, **named)

    with mock.patch("allranks.parallel.gloo_ops.is_gloo", lambda *_: False):
        gather_through_gloo(layer, mesh)
    x = torch.full((1, 4), float(dist.get_rank() + 1))
    with mock.patch.object(own, "__call__", reduce_scatter):
        layer(x).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    return asked, gradient.full_tensor().flatten().tolist(), [mean] * 16


def test_a_gpus_gradients_over_gloo_are_summed_and_divided_by_fsdp_itself(pool: Pools) -> None:
    """Torch's gloo may sum where a mean is asked for (pytorch issue 162338), and says nothing."""
    for asked, found, expected in pool(2).run(_as_on_gpus_over_gloo):
        assert asked and all("SUM" in op for op in asked)
        assert found == expected


def _chain(
    dtype: torch.dtype, num_replicas: int, *, overlap: bool = True
) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """Three units and what is around them, and the same as a plain module."""
    torch.manual_seed(0)
    units = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), *units).to(dtype)
    plain = torch.nn.Sequential(
        torch.nn.Linear(5, 8), *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in units)
    )
    plain.to(dtype).load_state_dict(model.state_dict())
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_replicas, size // num_replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    over = mesh if num_replicas > 1 else mesh["dp_shard"]
    for member in (*model[1:].children(), model):
        fully_shard(member, mesh=over)
    gather_through_gloo(model, over, overlap=overlap)
    return model, plain


def _apart(dtype: torch.dtype, num_replicas: int, num_backwards: int) -> float:
    """In a worker: how far gradients are from the mean of every rank's own ones, by the largest of them."""
    model, plain = _chain(dtype, num_replicas)
    size, rank, furthest = dist.get_world_size(), dist.get_rank(), 0.0
    for step in range(num_backwards):
        model(torch.full((2, 5), rank + step + 1.0, dtype=dtype)).square().sum().backward()
        for other in range(size):
            (plain(torch.full((2, 5), other + step + 1.0, dtype=dtype)).square().sum() / size).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(found.grad, DTensor) and expected.grad is not None
        apart = (found.grad.full_tensor() - expected.grad).abs().max() / expected.grad.abs().max()
        furthest = max(furthest, float(apart))
    return furthest


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "num_replicas"), [(2, 1), (4, 1), (4, 2)])
def test_gradients_are_whole_when_the_backward_has_ended(pool: Pools, world_size: int, num_replicas: int) -> None:
    for num_backwards in (1, 3):
        assert max(pool(world_size).run(_apart, torch.float64, num_replicas, num_backwards)) < 1e-12
    assert max(pool(world_size).run(_apart, torch.float32, num_replicas, 1)) < 1e-5


def _given_back(give_back: bool) -> tuple[list[float], int]:
    """In a worker: the sum, and the bytes of what was sent once it is there."""
    whole, part = torch.arange(4.0), torch.empty(2)
    exchange = Exchange(part, whole, dist.group.WORLD, 1, give_back=give_back)  # type: ignore[arg-type]
    exchange.finish()
    return part.tolist(), whole.untyped_storage().nbytes()


@pytest.mark.distributed
def test_what_was_sent_is_given_back_at_once_where_it_is_of_no_further_use(pool: Pools) -> None:
    assert pool(2).run(_given_back, True) == [([0.0, 2.0], 0), ([4.0, 6.0], 0)]
    assert pool(2).run(_given_back, False) == [([0.0, 2.0], 16), ([4.0, 6.0], 16)]


def _order(num_replicas: int, overlap: bool = True) -> tuple[list[str], list[str], bool]:
    """In a worker: what a first backward and a second one do in turn, and whether a hook sees the whole sum."""
    model, _ = _chain(torch.float32, num_replicas, overlap=overlap)
    events: list[str] = []
    begin, finish = Exchange.__init__, Exchange.finish

    def beginning(self: Exchange, *args: Any, **options: Any) -> None:
        events.append("begin")
        begin(self, *args, **options)

    def finishing(self: Exchange) -> None:
        events.append("finish")
        finish(self)

    def tell(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: events.append("compute"))

    model[0].register_forward_hook(tell)
    model[1].register_forward_hook(tell)
    seen: list[torch.Tensor] = []
    with mock.patch.object(Exchange, "__init__", beginning), mock.patch.object(Exchange, "finish", finishing):
        model(torch.ones(2, 5)).sum().backward()
        first = events.copy()
        events.clear()
        model(torch.ones(2, 5)).sum().backward()
        second = events.copy()
        model.zero_grad()
        watched = next(model[2].parameters())
        watched.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
        model(torch.ones(2, 5)).sum().backward()
    assert isinstance(watched.grad, DTensor)
    return first, second, torch.equal(seen[-1], watched.grad.to_local())


@pytest.mark.distributed
def test_a_unit_computes_while_the_gradients_of_the_one_before_travel(pool: Pools) -> None:
    at_once = ["begin", "finish"]
    for first, second, hook_saw in pool(2).run(_order, 1):
        assert hook_saw
        # Of the last unit but one, and so on; each is finished when the next one's are there.
        assert first == [
            "begin",
            "finish",
            "begin",
            "compute",
            "finish",
            "begin",
            "compute",
            "finish",
            "begin",
            "finish",
        ]
        assert [event for event in second if event != "compute"] == at_once * 4  # they are added to what is there
    for first, _, hook_saw in pool(2).run(_order, 1, False):
        assert hook_saw and [event for event in first if event != "compute"] == at_once * 4
    for first, _, hook_saw in pool(4).run(_order, 2):
        assert hook_saw and [event for event in first if event != "compute"] == at_once * 4  # copies are reduced next


def _lines(number: int) -> tuple[int, bool, bool]:
    """In a worker, once rank 0 alone is in `number` groups: lines, whether units of a size share one, and models."""
    for _ in range(number):
        dist.new_group([0], backend="gloo")
    made = []
    for _ in range(2):
        parts = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)
        model = torch.nn.Sequential(*parts, torch.nn.Linear(7, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        for member in (*model, model):
            fully_shard(member, mesh=mesh)
        gather_through_gloo(model, mesh, Path())
        model(torch.ones(2, 5)).sum().backward()
        units = [part._get_fsdp_state()._fsdp_param_group._all_gather_comm._line for part in model]  # type: ignore[operator]
        made.append([id(unit) for unit in units])
    return len(set(made[0])), made[0][1] == made[0][2], made[0][1:] == made[1][1:]


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "number"), [(2, 1), (4, 2)])
def test_each_size_of_unit_has_a_group_whatever_groups_there_are(pool: Pools, world_size: int, number: int) -> None:
    assert pool(world_size).run(_lines, number) == [(3, True, True)] * world_size
