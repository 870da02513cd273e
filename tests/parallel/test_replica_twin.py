"""The twin has DDP's buckets, and its messages: the same sizes in the same order, before and after it has rebuilt."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.parallel.replica_twin import ReplicaTwin, is_fake
from allranks.profiling.fakes import fake_mode
from tests.distributed.pool import Pools


class Sizes(TorchDispatchMode):
    """Notes the bytes of every all-reduce."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func._schema.name == "c10d::allreduce_":  # torch.ops cannot be pickled
            self.found.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def make(cap_mb: float | None) -> tuple[type[nn.Module], float | None]:
    """A module with parameters of several sizes, and the cap of its buckets."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
            self.last = nn.Linear(96, 7)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):  # not in the order of registration
                value = layer(value)
            found: torch.Tensor = self.last(value)
            return found

    return Net, cap_mb


def messages(module: nn.Module, steps: int) -> list[list[int]]:
    """Of each step."""
    found = []
    for _ in range(steps):
        with Sizes() as sizes:
            module(torch.ones(2, 96)).sum().backward()
        module.zero_grad(set_to_none=True)
        found.append(sizes.found)
    return found


def test_the_twin_sends_what_ddp_sends(pool: Pools) -> None:
    for cap_mb in (None, 0.08):
        for find_unused in (False, True):

            def case(cap_mb: float | None = cap_mb, find_unused: bool = find_unused) -> tuple[list[list[int]], ...]:
                kind, cap = make(cap_mb)
                real = DistributedDataParallel(
                    kind(), gradient_as_bucket_view=True, bucket_cap_mb=cap, find_unused_parameters=find_unused
                )
                told = messages(real, 3)
                with fake_mode():
                    fake = kind()
                    twin = ReplicaTwin(fake, dist.group.WORLD, bucket_mb=cap, find_unused=find_unused)
                    mine = messages(twin, 3)
                assert is_fake(twin) and not is_fake(real)
                return told, mine

            for told, mine in pool(2).run(case):
                # One of 28 bytes tells which parameters were used.
                assert mine[1:] == told[1:]
                assert sum(map(sum, mine)) == sum(map(sum, told))


def test_the_last_of_a_bucket_is_that_of_the_layer_whose_backward_fills_it() -> None:
    """Buckets of two layers each, in the order of their backwards: the last one of a forward comes first."""
    kind, cap = make(0.07)
    with fake_mode():
        twin = ReplicaTwin(kind(), None, bucket_mb=cap)
        with mock.patch.object(dist, "all_reduce", return_value=None):
            messages(twin, 2)
    assert [name.rpartition(".")[0] for name in twin.last_in_buckets] == ["layers.1", "layers.3", "layers.5"]


def test_where_unused_ones_are_looked_for_the_last_of_a_bucket_was_registered_first() -> None:
    kind, cap = make(0.07)
    with fake_mode():
        twin = ReplicaTwin(kind(), None, bucket_mb=cap, find_unused=True)
        with mock.patch.object(dist, "all_reduce", return_value=None):
            messages(twin, 2)
    names = [name for name, _ in twin.module.named_parameters()]
    assert twin.last_in_buckets == [min((names[one] for one in members), key=names.index) for members in twin.buckets]
    assert len(twin.buckets) > 1


def test_gradients_live_in_the_buckets() -> None:
    with fake_mode():
        kind, _ = make(None)
        twin = ReplicaTwin(kind(), None)
        twin.require_backward_grad_sync = False
        twin(torch.ones(2, 96)).sum().backward()
        apart = [p.grad for p in twin.parameters()]
        for parameter in twin.parameters():
            assert twin.lend(parameter)
        inside = [p.grad for p in twin.parameters()]
    assert all(a is not b for a, b in zip(apart, inside, strict=True))
    assert not twin.lend(torch.empty(1))
