"""Functional collectives (torch.distributed._functional_collectives, and DTensor) as the calls that they stand for.

torch dispatches `_c10d_functional::all_gather_into_tensor(input, group_size, group_name)` where `dist.all_gather` is a
`c10d::_allgather_base_(output, input, group, ...)`; what it makes of the former is not dispatched any more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

NAMESPACE = "_c10d_functional::"
IN_PLACE = {"isend": "send", "irecv": "recv_"}


class Call(NamedTuple):
    """A collective as torch dispatches it in place: its name, its group, its arguments as far as anybody reads them."""

    name: str
    group: dist.ProcessGroup
    args: Sequence[Any]


def stands_for(name: str, args: Sequence[Any], result: Any) -> Sequence[Call]:
    """The calls in place that a functional one stands for.

    Args:
        name: of its schema, "_c10d_functional::all_reduce".
        args: as it is dispatched.
        result: what it returned.

    Returns:
        One; as many as are made at once, of sends and receives; none: it is none, but a wait for one.
    """
    kind = name.removeprefix(NAMESPACE).removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    given = args[0]
    match kind:
        case "all_reduce":
            call: tuple[str, Sequence[Any]] = ("allreduce_", (given,))
        case "broadcast":
            call = ("broadcast_", (given, None, args[1]))
        case "all_gather_into_tensor":
            call = ("_allgather_base_", (result, given))
        case "reduce_scatter_tensor":
            call = ("_reduce_scatter_base_", (result, given))
        case "all_to_all_single":
            call = ("alltoall_base_", (result, given, None, *_uneven(*args[1:3])))
        case "isend" | "irecv":
            return [_exchange(kind, given, args[1], args[2], args[-1])]
        case "batch_p2p_ops":
            each = zip(given, args[3], args[1], args[2], strict=True)
            return [_exchange(op, tensor, peer, tag, args[-1]) for op, tensor, peer, tag in each]
        case _:
            return []
    return [Call(call[0], _group(args[-1]), call[1])]


def _exchange(op: str, tensor: Any, peer: int, tag: int, told: Any) -> Call:
    """A send or receive: in place it has its peer's rank within the group, a functional one that in the world."""
    group = _group(told)
    return Call(IN_PLACE[op], group, ([tensor], None, dist.get_group_rank(group, peer), tag))


def _uneven(*splits: Sequence[int]) -> Sequence[Sequence[int]]:
    """Splits, which a functional call always names; [] where they are what a call in place has without any."""
    return splits if any(len(set(each)) > 1 for each in splits) else ([], [])


def _group(told: Any) -> dist.ProcessGroup:
    if isinstance(told, str):
        return c10d._resolve_process_group(GroupName(told))
    return dist.ProcessGroup.unbox(told) if isinstance(told, torch.ScriptObject) else told
