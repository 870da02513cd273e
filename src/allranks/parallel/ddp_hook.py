"""How DDP's buckets of gradients travel, where the layout says otherwise than whole: `layout.ddp_hook`.

torch's own hooks divide after they have rounded, take any size for one that float16 can hold, and refuse bfloat16 over
gloo; these keep one rounding before the sum. All of them return the mean over the ranks, as DDP does.
Source: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.mesh import Mesh
from allranks.parallel.powersgd import PowerSGD
from allranks.parameter_map import Entry
from allranks.units import format_bytes
from allranks.verdict import Decision

LARGEST_EXPONENT = 15  # of float16: everything below 2**15 is far enough from its largest number, 65504
LARGEST_POWER = 126  # of the scale times the ranks, which has to fit float32
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@final
class DdpHook:
    """What takes the place of DDP's all-reduce, within steps only.

    Before the first step, and in passes that are thrown away, gradients travel whole: what the run compares with one
    device there must be exact, and no state may move.

    Args:
        layout: of the run; it has a `ddp_hook`.
        parameters: logical name -> trainable parameter.
        group: the ranks whose gradients DDP averages; None: all.
    """

    def __init__(self, layout: Layout, parameters: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
        self._layout, self._group = layout, group
        self._num_ranks = dist.get_world_size(group)
        self._num_bytes = sum(parameter.nbytes for parameter in parameters.values())
        self._num_elements = sum(parameter.numel() for parameter in parameters.values())
        self._step: int | None = None
        self._scale: torch.Tensor | None = None
        self.powersgd = PowerSGD(parameters, layout.powersgd_rank, group) if layout.ddp_hook == "powersgd" else None

    def attach(self, module: nn.Module) -> None:
        """Have the gradients of `module`, where it is under DDP, travel by this; before its first forward."""
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, self.reduce)

    @contextmanager
    def within(self, step: int, scale: torch.Tensor | None = None) -> Iterator[None]:
        """Inside, the backwards are those of optimizer step number `step`, counted from 0 over the whole run.

        Args:
            scale: 0-dim, by which gradients are multiplied before they travel; None where their loss was.
        """
        self._step, self._scale = step, scale
        try:
            yield
        finally:
            self._step = self._scale = None

    def reduce(self, state: object, bucket: GradBucket) -> Future[torch.Tensor]:
        """The mean over the ranks of a bucket of gradients, as the layout wants it; collective."""
        if self._scale is not None:
            bucket.buffer().mul_(self._scale)
        if self._step is None or (self.powersgd is not None and self._step < self._layout.powersgd_start):
            group = self._group or dist.group.WORLD
            assert group is not None
            return allreduce_hook(group, bucket)
        if self.powersgd is None:
            return self._reduce_rounded(bucket.buffer(), TYPES[self._layout.ddp_hook])
        self.powersgd.reduce(bucket.parameters(), bucket.gradients())
        buffer = bucket.buffer()
        reduced: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        reduced.set_result(buffer)
        return reduced

    def parts(self, entries: Mapping[str, Entry]) -> list[tuple[Entry, torch.Tensor]]:
        """What a checkpoint keeps of it."""
        return [] if self.powersgd is None else self.powersgd.parts(entries)

    def describe(self) -> Decision:
        """What travels in a step, and why that is not what one device computes."""
        hook, whole = f"layout.ddp_hook={self._layout.ddp_hook}", format_bytes(self._num_bytes)
        power = self.powersgd
        if power is None:
            sent = format_bytes(self._num_elements * TYPES[self._layout.ddp_hook].itemsize)
            what = f"gradients are summed in {self._layout.ddp_hook}: {sent} a step instead of {whole}"
            return Decision(what, f"{hook}; that rounds them, so that a run differs from one device's")
        start, sent = self._layout.powersgd_start, format_bytes(power.sent_bytes)
        what = f"from step {start + 1} on {sent} of gradients travel a step instead of {whole}"
        low = f"{power.num_matrices} matrices go as rank {self._layout.powersgd_rank}, {power.num_whole} tensors whole"
        return Decision(what, f"{hook}: {low}; that differs from what one device computes")

    def _reduce_rounded(self, buffer: torch.Tensor, dtype: torch.dtype) -> Future[torch.Tensor]:
        scale = None
        if dtype is torch.float16:
            scale = self._float16_scale(buffer)
            buffer.mul_(scale)
        rounded = buffer.to(dtype)
        work = dist.all_reduce(rounded, group=self._group, async_op=True)

        def widen(done: Future[list[torch.Tensor]]) -> torch.Tensor:
            if scale is not None and scale.is_cuda:  # read on a stream of the future's, which has not allocated it
                scale.record_stream(torch.cuda.current_stream(scale.device))
            divisor = self._num_ranks if scale is None else scale * self._num_ranks  # one pass over the buffer
            return buffer.copy_(done.value()[0]).div_(divisor)

        found: Future[torch.Tensor] = work.get_future().then(widen)
        return found

    def _float16_scale(self, buffer: torch.Tensor) -> torch.Tensor:
        """The power of two, agreed by all ranks, under which the sum of any number in `buffer` fits float16; 0-dim.

        Without one, small gradients would vanish below float16's smallest number, and undivided sums overflow. A
        power of two rounds nothing. Where a gradient is not finite it is 1, and that gradient stays what it is.
        """
        largest = torch.linalg.vector_norm(buffer, torch.inf)  # without a copy of it, as abs() makes one
        dist.all_reduce(largest, dist.ReduceOp.MAX, self._group)
        bits = (self._num_ranks - 1).bit_length()
        power = (LARGEST_EXPONENT - bits - torch.frexp(largest).exponent).clamp(max=LARGEST_POWER - bits)
        fits = largest.isfinite() & (largest > 0)
        return torch.where(fits, torch.ldexp(torch.ones_like(largest), power), 1.0)


def make_hook(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    entries: Mapping[str, Entry],
    tensors: Mapping[str, torch.Tensor],
    decisions: list[Decision],
) -> DdpHook:
    """The hook of a layout that asks for one, in place in every module under DDP; what it does goes to `decisions`.

    Raises:
        LayoutError: none is.
    """
    under_ddp = [module for module in modules.values() if isinstance(module, DistributedDataParallel)]
    if not under_ddp or mesh.gradient_group is None:
        raise LayoutError(
            f"layout.ddp_hook={mesh.layout.ddp_hook} changes what DDP sends, and a Task with a step() of its own has "
            "no DDP: leave it out"
        )
    parameters = {name: tensors[name] for name, entry in entries.items() if entry.trainable and entry.alias_of is None}
    hook = DdpHook(mesh.layout, parameters, mesh.gradient_group)
    for module in under_ddp:
        hook.attach(module)
    decisions.append(hook.describe())
    return hook
