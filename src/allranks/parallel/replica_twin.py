"""DDP for tensors without memory: torch's reducer reads values that a fake tensor has not, so its place is taken.

The twin keeps what a rehearsal sees of the reducer (torch/csrc/distributed/c10d/reducer.cpp, torch 2.13): torch's own
assignment of parameters to buckets, first in the order of registration and after the first backward in the order in
which gradients were ready; buffers that hold each bucket's gradients from then on; one all-reduce a bucket, in their
order, as soon as it is full. A test holds its buckets and bytes to those of a real run.
"""

import sys
from collections.abc import Collection
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Variable

BUCKET_BYTES = 25 * 2**20  # DDP's own bucket_cap_mb


def is_fake(module: nn.Module) -> bool:
    """Whether its parameters have no memory."""
    return any(isinstance(parameter, FakeTensor) for parameter in module.parameters())


@final
class ReplicaTwin(nn.Module):
    """What DistributedDataParallel is to a rehearsal.

    Args:
        group: the ranks whose gradients are averaged.
        bucket_mb: the size of a bucket; None: torch's.
        find_unused: whether every step says, too, which parameters it has used.
        static_graph: as DDP's.

    Attributes:
        module: as given.
        require_backward_grad_sync: whether the coming backward reduces.
        buckets: of every bucket the parameters, by their numbers among those that are reduced.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        bucket_mb: float | None = None,
        find_unused: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._group = group
        alone = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        reduced = {n: p for n, p in module.named_parameters() if p.requires_grad and n not in alone}
        self._names = list(reduced)
        self._parameters_reduced: list[torch.Tensor] = list(reduced.values())
        cap = BUCKET_BYTES if bucket_mb is None else int(bucket_mb * 2**20)
        self._limits = [_DEFAULT_FIRST_BUCKET_BYTES, cap] if bucket_mb is None else [cap]
        self._find_unused = find_unused
        self._stay_as_they_are = find_unused and not static_graph
        first = self._limits if self._stay_as_they_are else [sys.maxsize]
        assigned, _ = _compute_bucket_assignment_by_size(self._parameters_reduced, first)
        self._rebuilt = self._stay_as_they_are
        self._fill(list(reversed(assigned)))
        self._ready: list[int] = []
        self._works: list[dist.Work | None] = []
        self._launched = 0
        self._expects = self._queued = False
        for number, parameter in enumerate(self._parameters_reduced):
            parameter.register_post_accumulate_grad_hook(lambda p, number=number: self._take(number, p))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._begin()
        return self.module(*args, **kwargs)

    @property
    def last_in_buckets(self) -> list[str]:
        """Of every bucket the name of the parameter whose gradient is expected last: of those that were filled in the
        order of a backward the last one, of the others the one that was registered first.
        """
        return [self._names[members[0 if self._stay_as_they_are else -1]] for members in self.buckets]

    def lend(self, parameter: torch.Tensor) -> bool:
        """Give a parameter that no backward reached its place in a bucket as gradient; False where it has none."""
        number = next((n for n, p in enumerate(self._parameters_reduced) if p is parameter), None)
        if number is not None:
            parameter.grad = self._views[number]
        return number is not None

    def _begin(self) -> None:
        if not self._rebuilt and self._ready:
            self._rebuild()
        self._ready, self._launched, self._works = [], 0, []
        self._expects, self._queued = True, False

    def _fill(self, buckets: list[list[int]]) -> None:
        """Allocate the buckets, and give every parameter its place in one."""
        self.buckets = buckets
        self._flat: list[torch.Tensor] = []
        self._views: dict[int, torch.Tensor] = {}
        for members in buckets:
            some = [self._parameters_reduced[number] for number in members]
            flat = some[0].detach().new_empty(sum(p.numel() for p in some))
            parts = flat.split([p.numel() for p in some])
            self._flat.append(flat)
            for number, parameter, part in zip(members, some, parts, strict=True):
                self._views[number] = part.view(parameter.shape)

    def _rebuild(self) -> None:
        """Once, in the order of the first backward; what it did not reach stands where it is registered."""
        order = list(self._ready)
        for number in sorted(set(range(len(self._parameters_reduced))) - set(order)):
            place = next((i for i, other in enumerate(order) if other < number), len(order))
            order.insert(place, number)
        some: list[torch.Tensor] = [self._parameters_reduced[number] for number in order]
        assigned, _ = _compute_bucket_assignment_by_size(some, self._limits, [], order)
        self._fill(assigned)
        self._rebuilt = True

    def _take(self, number: int, parameter: torch.Tensor) -> None:
        """The gradient is there: it goes into its bucket, and a bucket that is full goes on its way."""
        if not self._expects:
            return
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)
        self._put(number, parameter)
        self._ready.append(number)
        self._launch(set(self._ready))

    def _put(self, number: int, parameter: torch.Tensor) -> None:
        view = self._views[number]
        if parameter.grad is not None and parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def _launch(self, ready: Collection[int]) -> None:
        while self._launched < len(self.buckets) and all(n in ready for n in self.buckets[self._launched]):
            work = dist.all_reduce(self._flat[self._launched], group=self._group, async_op=True)
            self._works.append(work)
            self._launched += 1

    def _finish(self) -> None:
        """At the end of the backward: what no gradient came for counts as zero, and every message is waited for."""
        self._launch(range(len(self._parameters_reduced)))
        if self._find_unused:
            used = torch.zeros(len(self._parameters_reduced), dtype=torch.int32)
            self._works.append(dist.all_reduce(used, group=self._group, async_op=True))
        for work in self._works:
            if work is not None:
                work.wait()
        self._expects = False
