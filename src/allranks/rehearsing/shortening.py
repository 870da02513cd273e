"""Deep models in bounded time: of a run of equal blocks some are traced, and the others let their input through.

Parameters, shards and buckets of all blocks exist; only the forwards of the middle ones are left out. What a traced
block next to them did stands for each of them (`Shortened.times`): in the middle of a run every block does the same.
The ends of a run are no measure, since FSDP gathers ahead there, or has nothing more to gather.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.parallel.blocks import search_blocks
from allranks.parallel.equal_blocks import kinds_of
from allranks.parallel.held_back import parameter_groups
from allranks.parallel.spread import Spread

KEPT_FIRST, KEPT_LAST = 2, 2


class NotShortened(Exception):
    """A block does not return what it is given, changed, or runs twice or never: all blocks have to be traced."""


@final
@dataclass
class Shortened:
    """What is left out of a model.

    Attributes:
        blocks: names of all blocks that this rank runs, in order.
        times: (phase, name of a block) -> how many it stands for; what stands for itself is not in it.
        left_out: names of the blocks that let their input through.
        absent: ids of the parameters that get no gradient by that.
    """

    blocks: tuple[str, ...] = ()
    times: dict[tuple[str, str], int] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    absent: set[int] = field(default_factory=set)


def shorten(spread: Spread, hints: Sequence[str], *, full: bool) -> Shortened:
    """Let the middle of every run of equal blocks pass its input on; with `full` none.

    Nor where blocks are gathered ahead: what is gathered for a block that is left out would stay.
    """
    full = full or spread.mesh.layout.prefetch is not None
    runs: Callable[[str], bool] = spread.stages.pipeline.runs if spread.stages is not None else lambda name: True
    begins: set[str] = set(spread.stages.pipeline.plan.points) if spread.stages is not None else set()
    found = Shortened()
    modules = {which: spread.bare(which) for which in spread.modules}
    names: list[str] = []
    # A layout that looks for blocks, and found none, has been refused before.
    for which, blocks in search_blocks(modules, hints).items():
        own = [name for name in blocks if runs(name)]
        for run in [] if full or len(modules) > 1 else equal_runs(modules[which], own, begins):
            _leave_out(modules[which], run, found)
        names += [f"{which}.{name}" if which else name for name in own]
    _let_be(modules.values(), found.absent)
    found.blocks = tuple(names)
    return found


def equal_runs(module: nn.Module, blocks: Sequence[str], begins: Collection[str] = ()) -> list[list[str]]:
    """Consecutive blocks of one list and one kind; none goes over the beginning of a stage."""
    kinds: dict[str, tuple[str, int]] = {}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in blocks):
        members = dict(module.get_submodule(parent).named_children())
        numbers = zip(members, kinds_of([*members.values()]), strict=True)
        kinds |= {f"{parent}.{key}" if parent else key: (parent, number) for key, number in numbers}
    found: list[list[str]] = []
    before: object = None
    for name in blocks:
        kind = kinds[name]
        if kind != before or name in begins:
            found.append([])
        found[-1].append(name)
        before = kind
    return found


def _leave_out(module: nn.Module, run: Sequence[str], found: Shortened) -> None:
    middle = run[KEPT_FIRST : len(run) - KEPT_LAST]
    if len(middle) < 2:
        return
    forward, backward = run[KEPT_FIRST - 1], run[-KEPT_LAST]
    shape = _Shape()
    module.get_submodule(forward).register_forward_hook(shape.learn, with_kwargs=True)
    calls = _Calls(module, len(run))
    for name in (*run[:KEPT_FIRST], *run[-KEPT_LAST:]):
        module.get_submodule(name).register_forward_pre_hook(calls.count, prepend=True)
    for name in middle:
        member: Any = module.get_submodule(name)
        # Torch's own place for another way to call a module.
        member._compiled_call_impl = partial(calls.counted, member, shape.pass_on)
        found.absent |= {id(p) for p in member.parameters()}
    inside = tuple(f"{name}." for name in middle)
    outside = (member for name, member in module.named_modules() if not f"{name}.".startswith(inside))
    kept = {id(p) for member in outside for p in member._parameters.values() if p is not None}
    found.absent -= kept
    found.times |= {("forward", forward): 1 + len(middle), ("backward", backward): 1 + len(middle)}
    found.left_out += tuple(middle)


def _let_be(modules: Iterable[nn.Module], absent: Collection[int]) -> None:
    """Have FSDP2's units without a forward end no backward, either.

    It ends that of every unit that has had none, and drops by that what the last one still reduces: in the full trace
    that is there until the next micro-step reduces something.
    """
    for group in parameter_groups(modules):
        if all(id(parameter.sharded_param) in absent for parameter in group.fsdp_params):
            group.post_backward = _nothing


def _nothing(*_: object) -> None:
    pass


class _Calls:
    """Which blocks of a run a forward of `module` has called: one that runs twice, or not at all, is like no other.

    Args:
        number: of blocks in the run.
    """

    def __init__(self, module: nn.Module, number: int) -> None:
        self._number = number
        self._seen: set[int] = set()
        module.register_forward_pre_hook(lambda *_: self._seen.clear(), prepend=True)
        module.register_forward_hook(self._end)

    def count(self, block: nn.Module, *_: Any) -> None:
        """Raises NotShortened at the second call; what a backward runs again is none."""
        if torch._C._current_graph_task_id() != -1:
            return
        if id(block) in self._seen:
            raise NotShortened(f"a forward calls a {type(block).__name__} twice")
        self._seen.add(id(block))

    def _end(self, module: nn.Module, *_: Any) -> None:
        """NotShortened where the forward has come to its end, as on one process, and left out blocks of the run."""
        if self._seen and len(self._seen) < self._number and torch._C._current_graph_task_id() == -1:
            raise NotShortened(f"a forward of {type(module).__name__} leaves out blocks")

    def counted(self, block: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it, and count that."""
        self.count(block)
        return call(*args, **kwargs)


class _Shape:
    """What a block makes of its input, seen from outside."""

    def __init__(self) -> None:
        self._leaves: list[Any] | None = None
        self._spec: Any = None
        self._place = 0

    def learn(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(output)
        given = _first(args, kwargs)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        alike = len(places) == 1 and given is not None and leaves[places[0]].shape == given.shape
        if not alike or leaves[places[0]].dtype != given.dtype:  # type: ignore[union-attr]
            raise NotShortened(f"{type(module).__name__} does not return its first argument, changed")
        self._leaves = [None if place in places else leaf for place, leaf in enumerate(leaves)]
        self._place = places[0]

    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """The output of a block that does nothing."""
        given = _first(args, kwargs)
        if self._leaves is None:
            return given  # another stage's turn: only shapes matter there
        leaves = list(self._leaves)
        leaves[self._place] = given
        return pytree.tree_unflatten(leaves, self._spec)


def _first(args: Any, kwargs: Any) -> torch.Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)


def follow_blocks(spread: Spread, blocks: Sequence[str], begin: Callable[[str, str, int], None]) -> Callable[[], None]:
    """Call `begin(phase, block, micro-step)` wherever a forward or backward of a block, or of the model, begins.

    Returns:
        What makes the next forward number 0 again.
    """
    turn = _Turn()
    for which in spread.modules:
        module = spread.bare(which)
        own = [name.removeprefix(f"{which}.") for name in blocks] if which else list(blocks)
        for name in ("", *own):
            try:
                member = module.get_submodule(name)
            except AttributeError:
                continue  # of another model
            _follow(member, f"{which}.{name}".strip(".") if name else "", turn, begin, root=not name)
    return turn.reset


class _Turn:
    """Which forward goes on, and the last output whose backward is followed: (the tensor, what forgets it, whose)."""

    def __init__(self) -> None:
        self.number = -1
        self.last: tuple[weakref.ref[torch.Tensor], Any, str] | None = None

    def reset(self) -> None:
        self.number = -1


def _follow(member: nn.Module, name: str, turn: _Turn, begin: Callable[[str, str, int], None], *, root: bool) -> None:
    def before(*_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        turn.number += root
        begin("forward", name, turn.number)

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        number, leaves = turn.number, pytree.tree_leaves(output)
        made = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)
        if made is None:
            return
        names = [name]
        if root and turn.last is not None and turn.last[0]() is made:
            # The model, or its stage, ends with a block: its own backward begins before the block's.
            _, handle, block = turn.last
            handle.remove()
            names.append(block)

        def enter(_: torch.Tensor) -> None:
            for one in names:
                begin("backward", one, number)

        turn.last = weakref.ref(made), made.register_hook(enter), name

    member.register_forward_pre_hook(before, prepend=True)
    member.register_forward_hook(after)
