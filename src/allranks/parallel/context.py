"""The cp axis: each sequence of a batch is cut over ranks, which attend to each other's positions.

Everything but attention and BatchNorm works on each position by itself, so that the user's module runs as it is, on
fewer positions: during its forward `torch.nn.functional.scaled_dot_product_attention` means attention over the whole
sequence, and `batchnorm` takes its statistics over all parts of it. What looks at other positions in another way is
found at the start (stepping/sequence_loss.py, stepping/whole_check.py, stepping/position_check.py).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from allranks.errors import LayoutError
from allranks.parallel.block_watch import in_backward
from allranks.parallel.context_ops import Call, attend_alone, swap_heads
from allranks.parallel.mesh import Mesh
from allranks.parallel.own_checkpoints import keep_contexts, runs_again
from allranks.parallel.regions import Regions
from allranks.parallel.ring import pass_around
from allranks.parallel.sequences import Sequences, Share, find_sequences, repeat_last
from allranks.verdict import Decision

# What forward may call the places of its positions in the whole sequence, and the dims that it expects.
POSITION_ARGUMENTS: Mapping[str, int] = {"positions": 1, "position_ids": 2}

_TORCHS_OWN = functional.scaled_dot_product_attention


@final
class Context:
    """How the ranks of a cp group share the sequences of a batch.

    Args:
        group: these ranks.
        kind: how they attend to each other's positions.

    Attributes:
        num_calls: of attention over sequences that are cut, so far, within `alone`, in this process.
    """

    def __init__(self, group: dist.ProcessGroup, kind: Literal["ulysses", "ring"]) -> None:
        self._group = group
        self._kind = kind
        self.share = Share(dist.get_rank(group), dist.get_world_size(group), balanced=kind == "ring")
        self._sequences: Sequences | None = None
        self._length = 0
        self._is_alone = self._is_repeated = False
        self.num_calls = 0

    def __deepcopy__(self, memo: object) -> "Context":
        return self  # a copy of the model computes with the same ranks

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that share a sequence."""
        return self._group

    def meet(self, batch: Any, arguments: Any, hints: Mapping[str, int]) -> Decision:
        """Find the sequences of batches like this one, which `cut` then cuts; as `find_sequences`, with its errors."""
        self._sequences = find_sequences(batch, arguments, hints)
        names = ", ".join(name or "the whole batch" for name in self._sequences.dims)
        return Decision(f"each sequence is cut over cp={self.share.num_ranks}: {names}", self._sequences.because)

    @property
    def sequences(self) -> Sequences:
        """What `meet` has found."""
        assert self._sequences is not None, "the Task has met its data before it is cut"
        return self._sequences

    def cut(self, batch: Any) -> Any:
        """`batch` with this rank's positions of every sequence. Raises LayoutError where they do not divide."""
        found, self._length = self.sequences.cut(batch, self.share)
        return found

    @property
    def length(self) -> int:
        """Positions of the sequences that were cut last."""
        return self._length

    def positions(self, device: torch.device) -> torch.Tensor:
        """Where this rank's positions lie in the sequences that were cut last, int64 [own positions]."""
        found = self.share.positions(self._length, device)
        return repeat_last(found, 0) if self._is_repeated else found

    @contextmanager
    def alone(self, *, repeated: bool = False) -> Iterator[None]:
        """Inside, attention looks at each position alone (`attend_alone`).

        Args:
            repeated: sequences that were cut are fed as `repeat_last` makes them, and so are their positions.
        """
        self._is_alone, self._is_repeated = True, repeated
        try:
            yield
        finally:
            self._is_alone = self._is_repeated = False

    def attend(self, call: Call) -> torch.Tensor:
        """Attention over whole sequences, for this rank's positions."""
        query, key, value = map(_autocast, (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
        if self._is_alone:
            self.num_calls += 1  # a compiled block would be compiled anew for every number
            return attend_alone(call)
        if self._kind == "ring":
            return pass_around(call, self._group)
        return swap_heads(call, self._group, _TORCHS_OWN)


# A context variable, because a block that is recomputed in the backward runs in the context of its forward.
_CURRENT: ContextVar[Context | None] = ContextVar("context", default=None)
_FORBIDDEN: ContextVar[str] = ContextVar("forbidden", default="")


def share_sequences(modules: Mapping[str, nn.Module], mesh: Mesh, decisions: list[Decision]) -> Context | None:
    """Let `modules`, before DDP goes around them, compute with this rank's positions; None where cp is 1."""
    if mesh.layout.cp == 1:
        return None
    context = Context(mesh.group("cp"), mesh.layout.context)
    functional.scaled_dot_product_attention = _attention
    keep_contexts()
    # In evaluation torch's encoder layers would go past that function.
    torch.backends.mha.set_fastpath_enabled(False)
    for module in modules.values():
        module.forward = _InContext(context, module.forward)
    how = {
        "ulysses": "layout.context=ulysses: each has all positions of some heads there",
        "ring": "layout.context=ring: keys and values go round, no process ever has a whole sequence",
    }[mesh.layout.context]
    decisions.append(Decision(f"attention joins the positions of {mesh.layout.cp} processes", how))
    return context


@final
class _InContext:
    """A callable in place of a module's forward; the module itself, and so its names, stay as they are."""

    def __init__(self, context: Context, forward: Callable[..., Any]) -> None:
        self._context = context
        self._forward = forward
        self.__signature__ = inspect.signature(forward)
        self._takes = [name for name in POSITION_ARGUMENTS if name in self.__signature__.parameters]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__signature__.bind_partial(*args, **kwargs)
        for name in self._takes:
            if bound.arguments.get(name) is None:
                bound.arguments[name] = self._positions(POSITION_ARGUMENTS[name], (args, kwargs))
        # From here to the next seeding: each rank has other positions, and one mask for all would repeat itself.
        Regions(self._context.share.rank).enter()
        before = _CURRENT.set(self._context)
        try:
            return self._forward(*bound.args, **bound.kwargs)
        finally:
            _CURRENT.reset(before)

    def _positions(self, ndim: int, arguments: Any) -> torch.Tensor:
        leaves = pytree.tree_leaves(arguments)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        found = self._context.positions(device)
        return found if ndim == 1 else found.unsqueeze(0)


def forbid_attention(module: nn.Module, why: str) -> None:
    """From now on attention over sequences that are cut raises LayoutError(`why`) inside the forward of `module`."""
    module.forward = _WithoutAttention(module.forward, why)


@final
class _WithoutAttention:
    """A callable in place of a module's forward, as `_InContext`."""

    def __init__(self, forward: Callable[..., Any], why: str) -> None:
        self._forward, self._why = forward, why
        self.__signature__ = inspect.signature(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = _FORBIDDEN.set(self._why)
        try:
            return self._forward(*args, **kwargs)
        finally:
            _FORBIDDEN.reset(before)


def _autocast(value: torch.Tensor) -> torch.Tensor:
    """In the type that autocast would give attention: the ring's kernels lie below it, and it halves the traffic."""
    kind = value.device.type
    if not torch.is_autocast_enabled(kind) or value.dtype is torch.float64:
        return value
    return value.to(torch.get_autocast_dtype(kind))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's own, and in a forward whose sequences are cut the attention over whole ones."""
    context = _CURRENT.get()
    if context is None:
        if in_backward() and not runs_again():
            raise LayoutError(
                "attention is computed again in the backward by other code than torch.utils.checkpoint, where nothing "
                "says whether its sequences are cut (cp): use that function there, or layout.recompute=full instead"
            )
        return _TORCHS_OWN(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if why := _FORBIDDEN.get():
        raise LayoutError(why)
    return context.attend(Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa))
