"""One step as it really happens: which unit is gathered, computed, dropped and reduced, with the bytes that travel.

Collectives are seen where torch dispatches them, those of DDP's reducer among them; to which unit they belong is known
from FSDP2's own methods, which are called through an instance. Bytes are those that a rank receives: of an all-reduce
2 (n - 1) / n of its size, as in a ring (https://docs.nvidia.com/deeplearning/nccl/user-guide), of all others exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.parallel.functional_calls import stands_for
from allranks.parallel.mesh import MESH_AXES
from allranks.parallel.spread import Spread
from allranks.rehearsed_messages import COPIES_OF_EXPERTS

DEVICE_OF: Final = torch.ops.prim.device.default
MODEL, REST = "the model", "the rest"
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
@dataclass(frozen=True, slots=True)
class Deed:
    """Something that a step does.

    Attributes:
        phase: "forward", "backward" or "update".
        what: "gather", "compute", "drop", or the collective.
        unit: the module, the bucket, or the axis over which something travels.
        num_bytes: that this rank receives; of a "drop" those that it frees.
    """

    phase: str
    what: str
    unit: str
    num_bytes: int = 0

    def to_json(self) -> dict[str, object]:
        """Its fields."""
        return asdict(self)


@final
class StepRecord:
    """What this rank does inside `recording`.

    Args:
        ignored: groups whose collectives are no part of the model's step (the agreement's).
        tell: is told of each deed when it begins.
    """

    def __init__(
        self,
        spread: Spread,
        ignored: Sequence[dist.ProcessGroup | None] = (),
        tell: Callable[[Deed], None] = lambda deed: None,
    ) -> None:
        self._tell = tell
        self._spread = spread
        self._ignored = {group.group_name for group in ignored if group is not None}
        self._axes = _axis_names(spread)
        self._deeds: list[Deed] = []
        self._context: tuple[str, str] | None = None  # (kind, unit) of what FSDP does now
        self._backward_seen = False
        self._buckets = 0

    @property
    def deeds(self) -> list[Deed]:
        """In order; what follows in several messages for one unit is one."""
        found: list[Deed] = []
        for deed in self._deeds:
            last = found[-1] if found else None
            travels = deed.what not in ("compute", "drop")
            if last and travels and (last.phase, last.what, last.unit) == (deed.phase, deed.what, deed.unit):
                found[-1] = Deed(deed.phase, deed.what, deed.unit, last.num_bytes + deed.num_bytes)
            else:
                found.append(deed)
        return found

    def forget(self) -> None:
        """Begin anew: what comes is the last micro-step."""
        self._deeds.clear()
        self._backward_seen, self._buckets = False, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look on inside."""
        with ExitStack() as stack:
            sharded = False
            for which, module in self._spread.modules.items():
                for group, unit, members in find_units(module, which):
                    sharded = True
                    stack.callback(self._watch_unit(group, unit, members))
            if not sharded:
                for module in self._spread.modules.values():
                    stack.callback(module.register_forward_pre_hook(lambda *_: self._enter(MODEL)).remove)
                    stack.callback(module.register_forward_hook(self._watch_output).remove)
            stack.enter_context(Collectives(self._collective))
            yield

    def _note(self, what: str, unit: str, num_bytes: int = 0) -> None:
        backward = torch._C._current_graph_task_id() != -1
        self._backward_seen |= backward
        phase = "backward" if backward else "update" if self._backward_seen else "forward"
        self._deeds.append(Deed(phase, what, unit, num_bytes))
        self._tell(self._deeds[-1])

    def _go_forward(self) -> None:
        """Outside of a backward, a forward begins or goes on: that of the next micro-step where one went before."""
        if torch._C._current_graph_task_id() == -1:
            self._backward_seen = False

    def _enter(self, unit: str) -> None:
        self._go_forward()
        self._note("compute", unit)

    def _watch_output(self, module: nn.Module, inputs: object, output: object) -> None:
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._note("compute", MODEL))
                return

    def _watch_unit(self, group: Any, unit: str, members: Sequence[nn.Module]) -> Callable[[], None]:
        """Put an eye on FSDP's methods of one unit; returns what takes it away."""
        hooks = [member.register_forward_pre_hook(lambda *_: self._enter(unit)) for member in members]
        unshard, post_backward, pre_backward = group.unshard, group.post_backward, group.pre_backward
        to_sharded = group._to_sharded

        def dropping() -> None:
            if not group.is_sharded:
                self._note("drop", unit, gathered_bytes(group))
            to_sharded()

        def before(*args: Any) -> None:
            first = group._training_state.name != "PRE_BACKWARD"
            pre_backward(*args)
            if first:
                self._note("compute", unit)

        group.unshard = self._inside(unshard, "gather", unit)
        group.post_backward = self._inside(post_backward, "reduce", unit)
        group.pre_backward, group._to_sharded = before, dropping

        def leave() -> None:
            for hook in hooks:
                hook.remove()
            group.unshard, group.post_backward, group.pre_backward = unshard, post_backward, pre_backward
            group._to_sharded = to_sharded

        return leave

    def _inside(self, method: Callable[..., Any], kind: str, unit: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind == "gather":
                self._go_forward()
            outer, self._context = self._context, (kind, unit)
            try:
                return method(*args, **kwargs)
            finally:
                self._context = outer

        return call

    def _collective(self, name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        if group.group_name in self._ignored:
            return
        num_bytes, what = received_bytes(name, group, args), collective_name(name)
        if self._context is not None:
            kind, unit = self._context
            exchanged = "all-reduce" if what == "all-reduce" else "reduce-scatter"
            self._note("gather" if kind == "gather" else exchanged, unit, num_bytes)
            return
        unit = f"over {self._axes.get(group.group_name, 'all processes')}"
        reducing = self._spread.mesh.gradient_group
        if torch._C._current_graph_task_id() != -1 and reducing is not None and group.group_name == reducing.group_name:
            self._buckets += 1
            unit = f"bucket {self._buckets}"
        self._note(what, unit, num_bytes)


@final
class Collectives(TorchDispatchMode):
    """Tells of every collective that is dispatched inside: torch's name for it, its group, its arguments."""

    def __init__(self, tell: Callable[[str, dist.ProcessGroup, Sequence[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = tell

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


def _nbytes(value: object) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _axis_names(spread: Spread) -> dict[str, str]:
    """Name of a process group -> the axis it goes along."""
    mesh, layout = spread.mesh, spread.mesh.layout
    axes = [axis for axis in (*MESH_AXES, "ep") if getattr(layout, axis) > 1]
    found: dict[str, str] = {mesh.group(axis).group_name: axis for axis in axes}
    if mesh.expert_mesh is not None:
        groups = [mesh.expert_mesh.get_group(dim) for dim in range(mesh.expert_mesh.ndim)]
        found |= {group.group_name: COPIES_OF_EXPERTS for group in groups}
    if mesh.gradient_group is not None:
        found.setdefault(mesh.gradient_group.group_name, "the data-parallel ranks")
    return found


def gathered_bytes(group: Any) -> int:
    """What a unit holds while it is gathered: here every parameter's whole, in the type that it was gathered in."""
    return sum(param._orig_size.numel() * param._unsharded_param.element_size() for param in group.fsdp_params)


def find_units(module: nn.Module, which: str) -> Iterator[tuple[Any, str, list[nn.Module]]]:
    """(FSDP's parameter group, its name, the modules that are gathered with it) of each unit."""
    found: dict[int, tuple[Any, list[str], list[nn.Module]]] = {}
    for name, member in module.named_modules(prefix=which):
        if isinstance(member, FSDPModule):
            assert isinstance(member, nn.Module)
            state: Any = member._get_fsdp_state()
            # torch 2.13 has several groups where parameters are cut in several ways, which allranks does not ask for.
            group = state._fsdp_param_group
            if group is not None:
                _, names, members = found.setdefault(id(group), (group, [], []))
                names.append(name or REST)
                members.append(member)
    for group, names, members in found.values():
        yield group, "+".join(names), members
