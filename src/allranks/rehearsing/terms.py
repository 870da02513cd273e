"""What every rank has to say alike of a collective: its type, its root, and its size where ranks bring equal parts.

Beside it, whether the call waits for the others.

Arguments are those with which torch dispatches it (torch/csrc/distributed/c10d/Ops.cpp, torch 2.13).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from allranks.rehearsed_messages import ANY_RANK

_ROOTS = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3}
"""Where its root stands, a rank of the group."""
_EVEN = {
    **dict.fromkeys(("allreduce_", "broadcast_", "reduce_", "_allgather_base_", "allgather_", "scatter_"), 0),
    **dict.fromkeys(("_reduce_scatter_base_", "reduce_scatter_", "gather_"), 1),
}
"""The argument whose bytes are the same on every rank."""


EXCHANGES = ("send", "recv_", "recv_any_source_")
"""What one rank does with one other."""


def peer_of(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> int:
    """The rank at the other end of a send or receive."""
    return ANY_RANK if name == "recv_any_source_" else dist.get_global_rank(group, args[2])


def terms_of(name: str, args: Sequence[Any]) -> str:
    """`float32`, `int64 from member 0 of its group`; "" of a barrier."""
    kinds = {leaf.dtype for leaf in pytree.tree_leaves(args[:2]) if isinstance(leaf, torch.Tensor)}
    said = "" if name == "barrier" else " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
    place = _ROOTS.get(name)
    root = "" if place is None else f"{'from' if name in ('broadcast_', 'scatter_') else 'to'} member {args[place]}"
    return f"{said} {root} of its group" if root else said


def even_bytes(name: str, args: Sequence[Any]) -> int | None:
    """What a rank brings or gets, the same on every rank of the group; None where ranks may differ."""
    if name == "alltoall_base_":
        place = None if args[3] or args[4] else 0
    else:
        place = _EVEN.get(name)
    if place is None:
        return None
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(args[place]) if isinstance(leaf, torch.Tensor))


def waits_of(func: Any, args: Sequence[Any]) -> bool:
    """Whether the call returns only when the others have come: it was made without `async_op=True`."""
    schema = getattr(func, "_schema", None)
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    place = names.index("async_op") if "async_op" in names else None
    return place is not None and place < len(args) and not args[place]  # left out of what is dispatched: its default
