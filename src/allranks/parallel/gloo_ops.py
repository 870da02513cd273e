"""Gathering and reduce-scattering over gloo by other operations than its own, which are slow.

Of 7 MB over loopback gloo's reduce_scatter takes longer than its all_reduce; an exchange of parts and a sum takes a
third to two thirds of that, and a broadcast of each part less than gloo's all_gather. bench/gloo.py measures it,
docs/explanation/measured.md has the figures. The parts are summed in the order of the ranks.
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from allranks.parallel.parting import Watch
from allranks.parallel.path import Path, wait_plainly

Wait = Callable[[dist.Work], object]

AVERAGE = dist.ReduceOp.AVG
SUMS = (dist.ReduceOp.SUM, AVERAGE)
NO_TIMEOUT = timedelta()
MOST_LINES = 8  # groups with threads and sockets: units of further sizes share the first
# By the world that they are part of, and the groups that it is divided into.
_LINES = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], list[dist.ProcessGroup]]]()


def is_gloo(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether tensors of this kind of device go through gloo in `group`, and lie where the host can add them."""
    return device_type == "cpu" and dist.get_backend(group) == dist.Backend.GLOO


def gather_by_broadcasts(
    whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup, wait: Wait = wait_plainly
) -> dist.Work:
    """Fill `whole`, contiguous, with every rank's `part` in the order of ranks; returns what waits for it."""
    rank, parts = dist.get_rank(group), whole.view(dist.get_world_size(group), part.numel()).unbind()
    mine = parts[rank]
    if mine.data_ptr() != part.data_ptr():
        mine.copy_(part.view(-1))
    works = [dist.broadcast(one, group=group, group_src=source, async_op=True) for source, one in enumerate(parts)]
    return _Works(works, wait)


def exchange_and_sum(
    part: torch.Tensor,
    whole: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    average: bool,
    wait: Wait = wait_plainly,
) -> None:
    """Fill `part` with this rank's part of the sum (or mean) of every rank's `whole`, contiguous."""
    size = dist.get_world_size(group)
    received = torch.empty_like(whole)
    work = dist.all_to_all_single(received.view(-1), whole.view(-1), group=group, async_op=True)
    if work is not None:
        wait(work)
    torch.sum(received.view(size, part.numel()), 0, out=part.view(-1))
    if average:
        part /= size


def gather_through_gloo(module: nn.Module, mesh: DeviceMesh, path: Path | None = None) -> None:
    """Let the units of an FSDP module, itself among them, communicate in this way, where it is gloo that they use.

    Args:
        mesh: of (dp_shard), or of (dp_replicate, dp_shard).
        path: what this rank enters, compared with the others' while it waits for them; None: nobody notes that.
    """
    group = mesh.get_group(mesh.ndim - 1)
    if not is_gloo(group, mesh.device_type) or dist.get_world_size(group) == 1:
        return
    if path is not None and path.wait is wait_plainly:
        path.wait = Watch(path, group).wait
    wait = wait_plainly if path is None else path.wait
    lines = {} if path is None else _open_lines(module, group)
    for member in module.modules():
        if isinstance(member, FSDPModule):
            member.set_custom_all_gather(cast("Any", _Gather(wait, lines.get(id(member._get_fsdp_state())))))
            member.set_custom_reduce_scatter(cast("Any", _Scatter(wait)))


def _open_lines(module: nn.Module, group: dist.ProcessGroup) -> dict[int, dist.ProcessGroup]:
    """Id of a unit's state -> the group over which it is gathered, one for each size of unit; all of the world call it.

    gloo ends the process where a message is longer than what is expected, as it would be where the ranks enter units of
    unequal size; over groups of their own they wait, and find out (`parting`).
    """
    sizes = dict[int, int]()
    _add_sizes(module, 0, dist.get_world_size(group), sizes)
    distinct = list(dict.fromkeys(sizes.values()))
    lines = dict(zip(distinct, [group, *_extra_lines(group, len(distinct) - 1)], strict=False))
    return {unit: lines.get(size, group) for unit, size in sizes.items()}


def _extra_lines(group: dist.ProcessGroup, wanted: int) -> list[dist.ProcessGroup]:
    """Groups of the same ranks as `group`: as many as any rank of the world wants, those that are there taken again.

    All ranks of the world make all of them, in one order. A group that its members alone make is named after what each
    of them has made before, and where that differs between them they wait for each other forever (torch 2.13).
    """
    own = torch.tensor([min(wanted, MOST_LINES - 1), *dist.get_process_group_ranks(group)])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    parts = tuple(dict.fromkeys(tuple(ranks) for _, *ranks in map(torch.Tensor.tolist, told)))
    world = dist.group.WORLD
    assert world is not None
    known = _LINES.setdefault(world, {}).setdefault(parts, [])
    for _ in range(len(known), max(int(row[0]) for row in told)):
        made = {part: dist.new_group(list(part), backend="gloo") for part in parts}
        known.append(made[tuple(own[1:].tolist())])
    return known


def _add_sizes(module: nn.Module, unit: int, num_ranks: int, sizes: dict[int, int]) -> None:
    """Add the elements that a rank gives when `module`, a part of `unit`, is gathered; units in it are their own."""
    if isinstance(module, FSDPModule):
        unit = id(module._get_fsdp_state())
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor) and parameter.dim():
            sizes[unit] = sizes.get(unit, 0) - (-parameter.shape[0] // num_ranks) * math.prod(parameter.shape[1:])
    for child in module.children():
        _add_sizes(child, unit, num_ranks, sizes)


class _Works(dist.Work):
    """Several operations under way, as one."""

    def __init__(self, works: Sequence[dist.Work | None], wait: Wait) -> None:
        super().__init__()
        self._works, self._wait = works, wait

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        for work in self._works:
            if work is not None:
                self._wait(work)
        return True


class _Allocating:
    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of its own for every operation."""
        return torch.empty(*size, dtype=dtype, device=device)


@final
class _Gather(_Allocating):
    def __init__(self, wait: Wait, line: dist.ProcessGroup | None = None) -> None:
        super().__init__(wait)
        self._line = line

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        works = gather_by_broadcasts(output_tensor, input_tensor, self._line or group, self._wait)
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
        exchange_and_sum(output_tensor, input_tensor, group, average=op == AVERAGE, wait=self._wait)
        return None
