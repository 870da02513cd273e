"""The pp axis: this rank runs some of the model's layers, the stage that is its own.

The user's forward runs as it stands, on every rank. A call of a module that belongs to another stage is answered with
zeros of the right shape, computed on the meta device, until the call of the module with which this rank's stage begins:
there the activations that the stage before has sent take the place of the arguments that depend on modules, and of the
same tensors in later calls. What the forward makes of its inputs by itself (masks, positions) it has made here, too.
The call with which the next stage begins ends the forward, and its arguments are what is sent on. So the model needs no
form of its own, names stay, and what passes from stage to stage may be any number of tensors.

Which of them are sent is found once, in a forward that records gradients and is followed between modules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.attribute_reads import AttributeReads
from allranks.parallel.block_watch import in_backward
from allranks.parallel.dependence import Dependence
from allranks.parallel.mesh import Mesh
from allranks.parallel.own_checkpoints import keep_contexts, runs_again
from allranks.parallel.stage_draws import drawing_alike, drawing_apart
from allranks.parallel.stage_plan import StagePlan
from allranks.parallel.stage_run import Payload, StageRun, current_run, running
from allranks.parallel.stand_in import StandIns, is_floating, on_meta


class _Left(BaseException):
    """Ends a forward where the next stage begins. No Exception: user code may catch those."""

    def __init__(self, run: StageRun, payload: Payload) -> None:
        super().__init__()
        self.run, self.payload = run, payload


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
        wrong: a use of what another stage has and does not send, in words; "" where none was seen.
    """

    def __init__(self, module: nn.Module, plan: StagePlan, mesh: Mesh) -> None:
        layout = mesh.layout
        self.module = module
        self.plan = plan
        self.last = plan.num_stages - 1
        self.stages = tuple(s for s in range(plan.num_stages) if layout.stage_rank(s) == mesh.coordinate("pp"))
        self.crossings: dict[int, tuple[int, ...]] = {}
        self._rank = mesh.coordinate("pp")
        self._stand_ins = StandIns()
        self._followed: set[int] = set()
        self.wrong = ""
        self._reads = AttributeReads(self._note)
        self._begins = {id(module.get_submodule(name)): stage for stage, name in enumerate(plan.points, 1)}
        self._homes = self._find_homes()
        self._common = [member for name, member in module.named_modules() if self._spans(name)]
        self.ranks, self._present = self._find_ranks(layout.stage_rank)
        self._install()
        keep_contexts()

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
        follows = torch.is_grad_enabled() and stage not in self._followed
        followed = Dependence(self.module) if follows else None
        run = StageRun(stage, received, followed)
        self._reads.begin(self._computed(stage) if followed is not None else ())
        kept = _buffers_kept(self._common if stage != self.stages[0] else ())
        with running(run), drawing_alike(), kept, followed or nullcontext():
            if followed is not None and run.live:
                followed.begin(())
            output = self._call(arguments)
        if run.live and run.left == (stage != self.last):
            if followed is not None:
                self._followed.add(stage)
                self._note(followed.wrong)
            return output
        missing = self.plan.points[stage if run.live else stage - 1]
        raise LayoutError(
            f"the forward ended and had not called {missing}, where a stage of the pipeline begins: cut the model "
            "elsewhere with hints().split_before, or use another layout"
        )

    def _note(self, what: str) -> None:
        self.wrong = self.wrong or what

    def _computed(self, at: int) -> list[nn.Module]:
        homes = self._homes
        return [m for m in self.module.modules() if id(m) in homes and (at in homes[id(m)] or _is_light(m))]

    def _call(self, arguments: Any) -> Any:
        return self.module(**arguments) if isinstance(arguments, Mapping) else self.module(*arguments)

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
                left.run.left = True
                return left.payload

        self.module.forward = until_left

    def _put_door(self, name: str, member: nn.Module) -> None:
        """Have every call of `member` pass here first, before any hook: it may be for another stage."""
        twin = on_meta(member)

        def door(*args: Any, **kwargs: Any) -> Any:
            run = current_run()
            if run is None:
                _check_outside(name)
                return member._call_impl(*args, **kwargs)
            if run.dependence is None or run.over:
                return self._pass(run, name, member, twin, args, kwargs)
            with run.dependence.paused():
                output = self._pass(run, name, member, twin, args, kwargs)
                run.dependence.mark(output, given=(args, kwargs))
                return output

        # torch's own place for another way to call a module, asked before its hooks.
        member._compiled_call_impl = door

    def _pass(self, run: StageRun, name: str, member: nn.Module, twin: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of `member` in the stage that runs."""
        stage, begins, first = run.stage, self._begins.get(id(member)), not run.over
        args, kwargs = run.replace(name, args, kwargs)
        if begins is not None and begins == stage + 1 and run.live and first:
            raise _Left(run, self._leave(run, begins, args, kwargs))
        if begins == stage:
            args, kwargs = self._enter(run, name, args, kwargs)
        if stage in self._homes[id(member)]:
            if run.dependence is not None and first:
                run.dependence.check_call(name, pytree.tree_leaves((args, kwargs)))
            with drawing_apart(stage):
                return member._call_impl(*args, **kwargs)
        if run.live and first:
            raise LayoutError(
                f"{name} is called in stage {stage} of the pipeline and registered among the modules of stage "
                f"{min(self._homes[id(member)])}: register modules in the order of their use, or cut the model "
                "elsewhere with hints().split_before"
            )
        if run.dependence is not None and first:
            self._reads.watch(name, member)
        return self._stand_ins.make(name, twin, member.training, args, kwargs)

    def _leave(self, run: StageRun, stage: int, args: Any, kwargs: Any) -> Payload:
        leaves = pytree.tree_leaves((args, kwargs))
        if stage not in self.crossings and run.dependence is not None:
            self.crossings[stage] = self._choose(self.plan.points[stage - 1], leaves, run.dependence)
        return tuple(leaves[place] for place in self.crossings.get(stage, ()))

    def _choose(self, point: str, leaves: Sequence[Any], dependence: Dependence) -> tuple[int, ...]:
        """Which of the arguments of `point` are sent: what no module has had a part in the next stage makes itself."""
        floating = [place for place, leaf in enumerate(leaves) if is_floating(leaf)]
        if not floating:
            raise LayoutError(
                f"{point} is called without a floating tensor: no activation passes there, so no stage of a pipeline "
                "can begin there"
            )
        dependence.check_call(point, leaves)
        dependence.check_sent(point, leaves)
        depends = [dependence.holds(leaf) or (is_floating(leaf) and leaf.requires_grad) for leaf in leaves]
        return tuple(place for place, sent in enumerate(depends) if sent) or (floating[0],)

    def _enter(self, run: StageRun, name: str, args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for place, tensor in zip(self.crossings[run.stage], run.received, strict=True):
            if isinstance(leaves[place], torch.Tensor):
                run.put(name, leaves[place], tensor)
            leaves[place] = tensor
        run.live = True
        if run.dependence is not None and not run.over:
            run.dependence.begin(run.received)
        return pytree.tree_unflatten(leaves, spec)


def _check_outside(name: str) -> None:
    """A call of module `name` that belongs to no forward of a stage is none that a backward makes again."""
    if in_backward() and not runs_again():
        raise LayoutError(
            f"{name} is computed again in the backward by other code than torch.utils.checkpoint, where nothing says "
            "what its stage of the pipeline had received: use that function there, or layout.recompute=full instead"
        )


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
