"""The moves of tensor parallelism between whole tensors and parts, each with the backward that makes it exact.

    enter         whole -> whole                  backward: sum         before a layer cut by columns
    leave         partial sums -> whole           backward: identity    after a layer cut by rows
    gather        parts of a dim -> whole         backward: own part    whole values for ordinary code
    split         whole -> own part of a dim      backward: gather      the inverse
    gather_sum    parts of a dim -> whole         backward: sum, own part    enter, where activations are cut
    sum_split     partial sums -> own part        backward: gather           leave, where activations are cut

A backward is the move's conjugate, so that it can be differentiated again (gradient penalties).

Parts are those of `torch.chunk`; a collective that needs equal ones pads them. Source: Megatron-LM (arXiv 1909.08053,
the conjugate operators f and g) and its sequence parallelism (arXiv 2205.05198, g and g-bar).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional

from allranks.parallel.gloo_ops import exchange_and_sum, gather_by_broadcasts, is_gloo

Group = dist.ProcessGroup

# torch 2.13 gives them new names and warns of the old ones; 2.11 has only those.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def part_bounds(extent: int, num_parts: int, index: int) -> tuple[int, int]:
    """Where part `index` of `extent` begins and ends, as `torch.chunk` cuts; the last ones may be empty."""
    length = -(-extent // num_parts)
    return min(index * length, extent), min((index + 1) * length, extent)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return leave(gradient, ctx.group), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return as_output(_sum(value, group))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return enter(gradient, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group, dim: int, extent: int, summed: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.summed = group, dim, summed
        return as_output(_all_gather(value, group, dim, extent))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        cut = sum_split if ctx.summed else split
        return cut(gradient, ctx.group, ctx.dim), None, None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Group, dim: int, summed: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.extent, ctx.summed = group, dim, value.shape[dim], summed
        return as_output((_reduce_scatter if summed else _own_part)(value, group, dim))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        whole = gather_sum if ctx.summed else gather
        return whole(gradient, ctx.group, ctx.dim, ctx.extent), None, None, None


def enter(value: torch.Tensor, group: Group) -> torch.Tensor:
    """`value`, whose gradient will be summed over `group`: each rank goes on with a part of what comes of it."""
    found: torch.Tensor = _Enter.apply(value, group)  # type: ignore[no-untyped-call]
    return found


def leave(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' values."""
    found: torch.Tensor = _Leave.apply(value, group)  # type: ignore[no-untyped-call]
    return found


def gather(value: torch.Tensor, group: Group, dim: int, extent: int) -> torch.Tensor:
    """The whole of which each rank has a part of `dim`, `extent` long; what follows is the same on every rank."""
    found: torch.Tensor = _Gather.apply(value, group, dim, extent, False)  # type: ignore[no-untyped-call]
    return found


def gather_sum(value: torch.Tensor, group: Group, dim: int, extent: int) -> torch.Tensor:
    """The same, where what follows differs by rank, so that its gradients are summed."""
    found: torch.Tensor = _Gather.apply(value, group, dim, extent, True)  # type: ignore[no-untyped-call]
    return found


def split(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of a value that every rank has."""
    found: torch.Tensor = _Split.apply(value, group, dim, False)  # type: ignore[no-untyped-call]
    return found


def sum_split(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """This rank's part along `dim` of the sum of the ranks' values."""
    found: torch.Tensor = _Split.apply(value, group, dim, True)  # type: ignore[no-untyped-call]
    return found


def gather_parts(whole: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    """Fill `whole`, contiguous, with every rank's `part` in the order of ranks."""
    if is_gloo(group, part.device.type):
        gather_by_broadcasts(whole, part, group).wait()
    else:
        all_gather_single(whole, part, group=group)


def as_output(found: torch.Tensor) -> torch.Tensor:
    """What a Function's forward returns of a tensor that a collective has filled in place."""
    # torch 2.11 compiles a Function that returns what it has changed in place to one whose gradient is 0, in silence.
    return found.clone() if torch.compiler.is_compiling() else found


def _sum(value: torch.Tensor, group: Group) -> torch.Tensor:
    # A copy: the gradient of a sum is one tensor for all its terms, and must not change under the others.
    found = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(found, group=group)
    return found


def _own_part(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    start, end = part_bounds(value.shape[dim], dist.get_world_size(group), dist.get_rank(group))
    return value.narrow(dim, start, end - start).clone(memory_format=torch.contiguous_format)


def _all_gather(value: torch.Tensor, group: Group, dim: int, extent: int) -> torch.Tensor:
    size = dist.get_world_size(group)
    length = -(-extent // size)
    front = _pad(value, dim, length).movedim(dim, 0).contiguous()
    whole = front.new_empty(size * length, *front.shape[1:])
    gather_parts(whole, front, group)
    return _as_dim(whole, dim, extent)


def _reduce_scatter(value: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    size, extent = dist.get_world_size(group), value.shape[dim]
    length = -(-extent // size)
    front = _pad(value, dim, size * length).movedim(dim, 0).contiguous()
    part = front.new_empty(length, *front.shape[1:])
    if is_gloo(group, value.device.type):
        exchange_and_sum(part, front, group, average=False)
    else:
        reduce_scatter_single(part, front, group=group)
    start, end = part_bounds(extent, size, dist.get_rank(group))
    return _as_dim(part, dim, end - start)


def _as_dim(front: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """The first `extent` of dim 0 as dim `dim`; no view, which FSDP2 would warn of as the output of a unit."""
    if len(front) == extent and dim % front.ndim == 0:
        return front
    return front[:extent].movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _pad(value: torch.Tensor, dim: int, extent: int) -> torch.Tensor:
    """`value` with zeros behind it along `dim`, up to `extent`."""
    missing = extent - value.shape[dim]
    if missing == 0:
        return value
    return functional.pad(value, [0, 0] * (value.ndim - 1 - dim % value.ndim) + [0, missing])
