"""One step as it really happens: which unit is gathered, computed, dropped and reduced, with the bytes that travel.

Collectives are seen where torch dispatches them, those of DDP's reducer among them; to which unit they belong is known
from FSDP2's own methods, which are called through an instance. Where FSDP has none, blocks are the units: see
`block_watch`. Bytes are those that a rank receives, or sends: of an all-reduce 2 (n - 1) / n of its size, as in a ring
(https://docs.nvidia.com/deeplearning/nccl/user-guide), of all others exactly.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, final

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from allranks.parallel.block_watch import in_backward, watch_block
from allranks.parallel.mesh import MESH_AXES
from allranks.parallel.recompute import watch_again
from allranks.parallel.seen_collectives import Collectives, collective_name, moved_bytes
from allranks.parallel.spread import Spread
from allranks.rehearsed_messages import COPIES_OF_EXPERTS

MODEL, REST, BUCKET = "the model", "the rest", "bucket "


@final
@dataclass(frozen=True, slots=True)
class Deed:
    """Something that a step does.

    Attributes:
        phase: "forward", "backward" or "update".
        what: "gather", "compute", "recompute" (a forward that the backward runs again), "drop", or the collective.
        unit: the module, the bucket, or the axis over which something travels, behind the module that asked for it.
        num_bytes: that this rank receives; of a "send" those that it sends, of a "drop" those that it frees.
    """

    phase: str
    what: str
    unit: str
    num_bytes: int = 0

    @property
    def travels(self) -> bool:
        """Whether it is a message."""
        return self.what not in ("compute", "recompute", "drop")

    def replaces(self, last: "Deed") -> bool:
        """Whether `last`, which came right before, was no more than its beginning: a backward that begins anew."""
        return self.what == "recompute" and (last.phase, last.what, last.unit) == (self.phase, "compute", self.unit)

    def to_json(self) -> dict[str, object]:
        """Its fields."""
        return asdict(self)


@final
class StepRecord:
    """What this rank does inside `recording`.

    Args:
        ignored: groups whose collectives are no part of the model's step (the agreement's).
        tell: is told of each deed when it begins.
        blocks: names of the modules that are units where FSDP has none.
    """

    def __init__(
        self,
        spread: Spread,
        ignored: Sequence[dist.ProcessGroup | None] = (),
        tell: Callable[[Deed], None] = lambda deed: None,
        blocks: Collection[str] = (),
    ) -> None:
        self._tell = tell
        self._spread = spread
        self._ignored = {group.group_name for group in ignored if group is not None}
        self._axes = _axis_names(spread)
        self._deeds: list[Deed] = []
        self._context: tuple[str, str] | None = None  # (kind, unit) of what FSDP does now
        self._blocks = frozenset(blocks)
        self._block = ""  # that runs, or whose backward does
        self._outside = False  # a block has ended: what is computed next is of the rest
        self._begun = ""  # the unit of FSDP whose backward has begun, while nothing is computed in it yet
        self._running: list[str] = []  # FSDP's units whose forwards are under way, each within the one before
        self._backward_seen = False
        self._buckets = 0

    @property
    def deeds(self) -> list[Deed]:
        """In order; what follows in several messages for one unit is one."""
        found: list[Deed] = []
        for deed in self._deeds:
            last = found[-1] if found else None
            if last and deed.travels and (last.phase, last.what, last.unit) == (deed.phase, deed.what, deed.unit):
                found[-1] = Deed(deed.phase, deed.what, deed.unit, last.num_bytes + deed.num_bytes)
            elif last and deed.replaces(last):
                found[-1] = deed
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
            units = [unit for which, module in self._spread.modules.items() for unit in find_units(module, which)]
            for group, unit, members in units:
                stack.callback(self._watch_unit(group, unit, members))
            if not units:
                for which, module in self._spread.modules.items():
                    # Copies of nn.DataParallel run at once, each in a thread: of these only the whole is followed.
                    apart = isinstance(module, nn.DataParallel)
                    self._watch_blocks(which, module if apart else self._spread.bare(which), stack, apart=apart)
            stack.enter_context(Collectives(self._collective, self._computes_around if units else self._computes))
            yield

    def _watch_blocks(self, which: str, module: nn.Module, stack: ExitStack, *, apart: bool) -> None:
        """Put an eye on a model and its blocks, until `stack` is closed."""
        blocks = {} if apart else {n: m for n, m in module.named_modules(prefix=which) if n in self._blocks}
        stack.callback(module.register_forward_pre_hook(lambda *_: self._enter("")).remove)
        for name, block in blocks.items():
            stack.callback(watch_block(block, partial(self._begin, name), partial(self._end, name)))
            stack.callback(watch_again(block, partial(self._again, name)))

    def _begin(self, block: str) -> None:
        self._block, self._outside = block, False
        self._note("compute", block)

    def _end(self, block: str) -> None:
        if self._block == block:
            self._block, self._outside = "", True

    @contextmanager
    def _again(self, unit: str) -> Iterator[None]:
        """Inside, a forward is run again; behind it the backward goes on."""
        self._note("recompute", unit)
        try:
            yield
        finally:
            self._note("compute", unit)

    def _computes(self) -> None:
        """Something is computed; by what no block is, where a block has ended or a backward begins."""
        backward = in_backward()
        if (backward and not self._backward_seen) or (self._outside and (backward or not self._backward_seen)):
            self._block, self._outside = "", False
            self._note("compute", self._around)

    def _computes_around(self) -> None:
        """Something is computed; by no unit of FSDP, where one has ended in a forward, or by the loss's backward."""
        self._begun = self._begun if self._context is not None else ""
        if self._context is None and (in_backward() or self._outside) and not self._backward_seen:
            self._outside, last = False, self._deeds[-1] if self._deeds else None
            if in_backward() or last is None or (last.what, last.unit) != ("compute", REST):
                self._note("compute", REST)

    @property
    def _around(self) -> str:
        """What is no block."""
        return REST if self._blocks else MODEL

    def _note(self, what: str, unit: str, num_bytes: int = 0, *, between: bool = False) -> None:
        """`between`: it goes between the passes of two stages, and is no part of the update."""
        backward = in_backward()
        self._backward_seen |= backward
        behind = "backward" if between else "update"
        phase = "backward" if backward else behind if self._backward_seen else "forward"
        self._deeds.append(Deed(phase, what, unit, num_bytes))
        self._tell(self._deeds[-1])

    def _go_forward(self) -> None:
        """Outside of a backward, a forward begins or goes on: that of the next micro-step where one went before."""
        if not in_backward():
            self._backward_seen = False

    def _enter(self, unit: str) -> None:
        """A forward begins, of a unit or of a model with all that is around its blocks (""): a member or all of it."""
        self._go_forward()
        self._block, self._outside = "" if unit == REST else unit, False
        self._running = [] if unit in ("", REST) else [*self._running, unit]
        self._note("compute", unit or self._around)

    def _leave(self, *_: object) -> None:
        self._block, self._running = "", self._running[:-1]
        self._outside = not self._running and not in_backward()

    def _watch_unit(self, group: Any, unit: str, members: Sequence[nn.Module]) -> Callable[[], None]:
        """Put an eye on FSDP's methods of one unit; returns what takes it away."""
        hooks = [member.register_forward_pre_hook(lambda *_: self._enter(unit)) for member in members]
        hooks += [member.register_forward_hook(self._leave) for member in members]
        again = [watch_again(member, partial(self._again, unit)) for member in members]
        unshard, post_backward, pre_backward = group.unshard, group.post_backward, group.pre_backward
        to_sharded, pre_forward = group._to_sharded, group.pre_forward

        def dropping() -> None:
            if not group.is_sharded:
                self._note("drop", unit, gathered_bytes(group))
            to_sharded()

        preparing = self._inside(pre_backward, "gather", unit)

        def before(*args: Any) -> None:
            first = group._training_state.name != "PRE_BACKWARD"
            preparing(*args)
            # A stage of a pipeline that ends with a block begins the backwards of both at once: the block's goes on.
            now = self._begun if unit == REST and self._begun else unit
            if first and (now == unit or self._deeds[-1].what != "compute"):
                self._block, self._begun = "" if now == REST else now, now
                self._note("compute", now)

        group.unshard, group.pre_forward = (self._inside(one, "gather", unit) for one in (unshard, pre_forward))
        group.post_backward = self._inside(post_backward, "reduce", unit)
        group.pre_backward, group._to_sharded = before, dropping

        def leave() -> None:
            for hook in hooks:
                hook.remove()
            for forget in again:
                forget()
            group.unshard, group.post_backward, group.pre_backward = unshard, post_backward, pre_backward
            group._to_sharded, group.pre_forward = to_sharded, pre_forward

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
                if kind == "reduce" and self._block == unit:
                    self._block = ""

        return call

    def _collective(self, name: str, group: dist.ProcessGroup, args: Sequence[Any]) -> None:
        if group.group_name in self._ignored:
            return
        num_bytes, what = moved_bytes(name, group, args), collective_name(name)
        if self._context is not None:
            kind, unit = self._context
            exchanged = "all-reduce" if what == "all-reduce" else "reduce-scatter"
            self._note("gather" if kind == "gather" else exchanged, unit, num_bytes)
            return
        asked = f"{self._block} " if in_backward() or not self._backward_seen else ""
        axis = self._axes.get(group.group_name, "all processes")
        unit = f"{asked.lstrip()}over {axis}"
        reducing = self._spread.mesh.gradient_group
        if in_backward() and reducing is not None and group.group_name == reducing.group_name:
            self._buckets += 1
            unit = f"{BUCKET}{self._buckets}"
        self._note(what, unit, num_bytes, between=axis == "pp" and what in ("send", "receive"))


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
