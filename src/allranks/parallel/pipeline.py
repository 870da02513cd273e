"""The pp axis: this rank runs some of the model's layers, the stage that is its own.

The user's forward runs as it stands, on every rank. A call of a module that belongs to another stage is answered with
zeros of the right shape, computed on the meta device, until the call of the module with which this rank's stage begins:
there the activations that the stage before has sent take the place of the arguments that depend on parameters. What the
forward makes of its inputs by itself (masks, positions) it has made here, too. The call with which the next stage
begins ends the forward, and its arguments are what is sent on. So the model needs no form of its own, names stay, and
what passes from stage to stage may be any number of tensors.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.mesh import Mesh
from allranks.parallel.stage_plan import StagePlan

Payload = tuple[torch.Tensor, ...]


class _Left(BaseException):
    """Ends a forward where the next stage begins. No Exception: user code may catch those."""

    def __init__(self, payload: Payload) -> None:
        super().__init__()
        self.payload = payload


@final
class Pipeline:
    """One module as this rank runs it.

    Made before the module's parameters are placed, and before anything else changes how its parts compute.

    Args:
        module: the user's.
        plan: its stages.
        mesh: the layout over the ranks.

    Attributes:
        stages: those that this rank runs, ascending.
        ranks: logical name of a parameter or buffer that only some ranks along pp hold -> those.
        crossings: stage -> which of the arguments that begin it, flattened, are sent to it. Found at the first forward
            that records gradients.
    """

    def __init__(self, module: nn.Module, plan: StagePlan, mesh: Mesh) -> None:
        layout = mesh.layout
        self.module = module
        self.plan = plan
        self.last = plan.num_stages - 1
        self.stages = tuple(s for s in range(plan.num_stages) if layout.stage_rank(s) == mesh.coordinate("pp"))
        self.crossings: dict[int, tuple[int, ...]] = {}
        self._rank = mesh.coordinate("pp")
        self._stage: int | None = None
        self._live = self._left = False  # whether what runs is this stage's; whether the next one's has been called
        self._received: Payload = ()
        self._shapes: dict[object, Any] = {}
        self._begins = {id(module.get_submodule(name)): stage for stage, name in enumerate(plan.points, 1)}
        self._homes = self._find_homes()
        self._common = [member for name, member in module.named_modules() if self._spans(name)]
        self.ranks, self._present = self._find_ranks(layout.stage_rank)
        self._install()

    def is_absent(self, tensor: torch.Tensor) -> bool:
        """Whether this rank holds nothing of a parameter or buffer, as it was built."""
        return id(tensor) not in self._present

    def runs(self, name: str) -> bool:
        """Whether the module of this name belongs to a stage of this rank."""
        return any(stage in self.stages for home, stage in self.plan.homes.items() if f"{name}.".startswith(f"{home}."))

    def run(self, stage: int, arguments: object, received: Payload) -> Any:
        """The forward of one stage: what it sends on (a tuple of tensors), or the module's output from the last one.

        Args:
            arguments: of the module's forward, a tuple or a mapping.
            received: what the stage before sends on; () for the first.
        """
        self._stage, self._received, self._live, self._left = stage, received, stage == 0, False
        try:
            with _buffers_kept(self._common if stage != self.stages[0] else ()):
                output = self._call(arguments)
            if self._live and self._left == (stage != self.last):
                return output
        finally:
            self._stage, self._received = None, ()
        missing = self.plan.points[stage if self._live else stage - 1]
        raise LayoutError(
            f"the forward ended and had not called {missing}, where a stage of the pipeline begins: cut the model "
            "elsewhere with hints().split_before, or use another layout"
        )

    def _call(self, arguments: object) -> Any:
        return self.module(**arguments) if isinstance(arguments, Mapping) else self.module(*_as_tuple(arguments))

    def parameters(self, stage: int) -> Iterator[nn.Parameter]:
        """The trainable parameters that a stage of this rank computes with, each once."""
        seen: set[int] = set()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            own = parameter.requires_grad and not parameter.is_meta and self._stage_of(name) in (stage, None)
            if own and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def _stage_of(self, name: str) -> int | None:
        return next((stage for home, stage in self.plan.homes.items() if name.startswith(f"{home}.")), None)

    def _spans(self, name: str) -> bool:
        """Whether the module of this name lies in several stages, and so does what it does itself."""
        return not name or any(home.startswith(f"{name}.") for home in self.plan.homes)

    def _find_homes(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for name, stage in self.plan.homes.items():
            for member in _called(self.module.get_submodule(name)):
                found.setdefault(id(member), set()).add(stage)
        return found

    def _find_ranks(self, rank_of: Callable[[int], int]) -> tuple[dict[str, frozenset[int]], set[int]]:
        """The ranks of each name that not all hold, and the ids of what this one holds."""
        named = (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        )
        everywhere = frozenset(map(rank_of, range(self.last + 1)))
        ranks: dict[int, frozenset[int]] = {}
        for name, tensor in named:
            stage = self._stage_of(name) if self._has_home(name) else None
            own = everywhere if stage is None else frozenset((rank_of(stage),))
            ranks[id(tensor)] = ranks.get(id(tensor), frozenset()) | own
        present = {id(tensor) for _, tensor in named if self._rank in ranks[id(tensor)]}
        return {name: ranks[id(tensor)] for name, tensor in named if ranks[id(tensor)] != everywhere}, present

    def _has_home(self, name: str) -> bool:
        home = next((home for home in self.plan.homes if name.startswith(f"{home}.")), None)
        return home is not None and not _is_light(self.module.get_submodule(home))

    def _install(self) -> None:
        for name, member in list(self.module.named_modules()):
            if id(member) in self._homes and (id(member) in self._begins or not _is_light(member)):
                self._put_door(name, member)
        forward = self.module.forward

        @wraps(forward)
        def until_left(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except _Left as left:
                self._left = True
                return left.payload

        self.module.forward = until_left

    def _put_door(self, name: str, member: nn.Module) -> None:
        """Have every call of `member` pass here first, before any hook: it may be for another stage."""
        twin = _on_meta(member)

        def door(*args: Any, **kwargs: Any) -> Any:
            stage = self._stage
            if stage is None:
                return member._call_impl(*args, **kwargs)
            begins = self._begins.get(id(member))
            if begins is not None and begins == stage + 1 and self._live:
                raise _Left(self._leave(begins, args, kwargs))
            if begins == stage:
                args, kwargs = self._enter(stage, args, kwargs)
            if stage in self._homes[id(member)]:
                return member._call_impl(*args, **kwargs)
            if self._live:
                raise LayoutError(
                    f"{name} is called in stage {stage} of the pipeline and registered among the modules of stage "
                    f"{min(self._homes[id(member)])}: register modules in the order of their use, or cut the model "
                    "elsewhere with hints().split_before"
                )
            return self._stand_in(name, member, twin, args, kwargs)

        # torch's own place for another way to call a module, asked before its hooks.
        member._compiled_call_impl = door

    def _leave(self, stage: int, args: Any, kwargs: Any) -> Payload:
        leaves = pytree.tree_leaves((args, kwargs))
        chosen = self.crossings.get(stage)
        if chosen is None:
            floating = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
            if not floating:
                raise LayoutError(
                    f"{self.plan.points[stage - 1]} is called without a floating tensor: no activation passes there, "
                    "so no stage of a pipeline can begin there"
                )
            # What no parameter has touched the next stage makes by itself.
            found = tuple(i for i in floating if leaves[i].requires_grad) or (floating[0],)
            if not torch.is_grad_enabled():
                return tuple(leaves[i] for i in found)
            chosen = self.crossings.setdefault(stage, found)
        return tuple(leaves[i] for i in chosen)

    def _enter(self, stage: int, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, tensor in zip(self.crossings[stage], self._received, strict=True):
            leaves[place] = tensor
        self._live = True
        return pytree.tree_unflatten(leaves, spec)

    def _stand_in(self, name: str, member: nn.Module, twin: nn.Module, args: Any, kwargs: Any) -> Any:
        """Zeros in the shape of what `member` would return."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (id(member), member.training, spec, *map(_describe, leaves))
        if key not in self._shapes:
            on_meta = [leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            meta_args, meta_kwargs = pytree.tree_unflatten(on_meta, spec)
            try:
                with torch.no_grad():
                    self._shapes[key] = twin.train(member.training)(*meta_args, **meta_kwargs)
            except Exception as error:
                # It looks at values, as a router of tokens does. A block returns what it is given, changed; where this
                # one does not, the forward fails behind it, or is compared with the whole model at the start.
                given = next((leaf for leaf in on_meta if _is_floating(leaf)), None)
                if given is None:
                    raise LayoutError(
                        f"{name} belongs to another stage of the pipeline, and what it returns is not known without "
                        f"computing it ({type(error).__name__}: {error}): use another layout"
                    ) from error
                self._shapes[key] = given
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        return pytree.tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), self._shapes[key])


@contextmanager
def _buffers_kept(members: Sequence[nn.Module]) -> Iterator[None]:
    """Put the modules' own buffers back: a rank that runs their forward for a second stage counts it once."""
    kept = [(m, leaf, b, b.clone()) for m in members for leaf, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for member, leaf, buffer, value in kept:
            # Through .data: the backward that still comes may have saved the buffer.
            buffer.data.copy_(value)
            member._buffers[leaf] = buffer


def _as_tuple(arguments: object) -> tuple[Any, ...]:
    assert isinstance(arguments, Sequence)
    return tuple(arguments)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that are called where `module` is used: a list or dict of modules never is, but what it holds."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _is_light(module: nn.Module) -> bool:
    """Whether it has nothing that a checkpoint would hold, so that every stage may run it."""
    kept = (name for name, _ in module.named_buffers() if not _is_transient(module, name))
    return not any(True for _ in module.parameters()) and not any(True for _ in kept)


def _is_transient(module: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in module.get_submodule(owner)._non_persistent_buffers_set


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory, whose calls give shapes."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        data = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _describe(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)
