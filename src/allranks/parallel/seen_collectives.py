"""Collectives as torch dispatches them: which, over which group, and the bytes that this rank receives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.parallel.functional_calls import stands_for

DEVICE_OF: Final = torch.ops.prim.device.default
_NAMES = {
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
}


@final
class Collectives(TorchDispatchMode):
    """Tells of every collective that is dispatched inside: torch's name for it, its group, its arguments.

    Args:
        computes: is called before each operation that is none.
    """

    def __init__(
        self,
        tell: Callable[[str, dist.ProcessGroup, Sequence[Any]], None],
        computes: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell
        self._computes = computes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return args[0].device  # of tensors without memory this comes as often as all else together
        if func.namespace == "_c10d_functional":
            found = func(*args, **(kwargs or {}))
            for call in stands_for(func._schema.name, args, found):
                self._tell(*call)
            return found
        if func.namespace == "c10d":
            boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
            if boxed is not None and func._schema.name != "c10d::barrier":
                self._tell(func._schema.name.removeprefix("c10d::"), dist.ProcessGroup.unbox(boxed), args)
        else:
            self._computes()
        return func(*args, **(kwargs or {}))


def collective_name(name: str) -> str:
    """For people, of a collective as torch dispatches it."""
    return _NAMES.get(name, name.strip("_"))


def received_bytes(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> int:
    """Bytes that this rank receives in a collective, given as torch dispatches it."""
    size = group.size()
    first = _nbytes(args[0])
    if name == "allreduce_":
        return first * 2 * (size - 1) // size
    if name == "broadcast_":
        return 0 if args[2] == group.rank() else first
    if name in ("_allgather_base_", "allgather_"):
        return first - _nbytes(args[1])
    if name == "_reduce_scatter_base_":
        return first * (size - 1)
    if name == "alltoall_base_":
        splits = args[3]
        own = first // size if not splits else first * splits[group.rank()] // max(1, sum(splits))
        return first - own
    return 0 if name == "send" else first


def moved_bytes(name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> int:
    """Bytes that this rank receives, and of a send those that it sends."""
    return _nbytes(args[0]) if name == "send" else received_bytes(name, group, args)


def _nbytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
