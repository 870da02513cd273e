"""Gathering and reduce-scattering over gloo by other operations than its own, which are slow.

Of 7 MB over loopback gloo's reduce_scatter takes longer than its all_reduce; an exchange of parts and a sum takes a
third to two thirds of that, and a broadcast of each part less than gloo's all_gather. bench/gloo.py measures it,
docs/explanation/measured.md has the figures. The parts are summed in the order of the ranks.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

AVERAGE = dist.ReduceOp.AVG
SUMS = (dist.ReduceOp.SUM, AVERAGE)
NO_TIMEOUT = timedelta()


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether tensors of this kind of device go through gloo in `group`, and lie where the host can add them."""
    return device_type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_by_broadcasts(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Fill `whole`, contiguous, with every rank's `part` in the order of ranks; returns what waits for it."""
    rank, parts = dist.get_rank(group), whole.view(dist.get_world_size(group), part.numel()).unbind()
    mine = parts[rank]
    if mine.data_ptr() != part.data_ptr():
        mine.copy_(part.view(-1))
    works = [dist.broadcast(one, group=group, group_src=source, async_op=True) for source, one in enumerate(parts)]
    return _Works(works)


def exchange_and_sum(part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *, average: bool) -> None:
    """Fill `part` with this rank's part of the sum (or mean) of every rank's `whole`, contiguous."""
    size = dist.get_world_size(group)
    received = torch.empty_like(whole)
    dist.all_to_all_single(received.view(-1), whole.view(-1), group=group)
    torch.sum(received.view(size, part.numel()), 0, out=part.view(-1))
    if average:
        part /= size


def gather_through_gloo(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the units of an FSDP module, itself among them, communicate in this way, where it is gloo that they use.

    Args:
        mesh: of (dp_shard), or of (dp_replicate, dp_shard).
    """
    group = mesh.get_group(mesh.ndim - 1)
    if not is_gloo(group, mesh.device_type) or dist.get_world_size(group) == 1:
        return
    for member in module.modules():
        if isinstance(member, FSDPModule):
            member.set_custom_all_gather(cast("Any", _Gather()))
            member.set_custom_reduce_scatter(cast("Any", _Scatter()))


class _Works(dist.Work):
    """Several operations under way, as one."""

    def __init__(self, works: Sequence[dist.Work | None]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            if work is not None:
                work.wait()
        return True


class _Allocating:
    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of its own for every operation."""
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        works = gather_by_broadcasts(output_tensor, input_tensor, group)
        if async_op:
            return works
        works.wait()
        return None


@final
class _Scatter(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if op not in SUMS or async_op:
            work = dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
            return cast("dist.Work | None", work)
        exchange_and_sum(output_tensor, input_tensor, group, average=op == AVERAGE)
        return None
