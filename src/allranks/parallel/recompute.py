"""Activations that are computed again in the backward instead of kept, block by block.

Between its forward and its backward a recomputed block holds its input, its output and what a policy keeps; the
backward runs the block's forward once more for the rest. Source: "Training Deep Nets with Sublinear Memory Cost" (arXiv
1604.06174), through torch.utils.checkpoint, which gives the second run the first one's autocast and torch's generators.
"""

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from typing import Any, final

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from allranks.errors import LayoutError
from allranks.kept_products import keeps_product
from allranks.parallel.module_state import ModuleState
from allranks.parallel.own_checkpoints import InContext
from allranks.parallel.plain_generators import PlainGenerators

Forward = Callable[..., Any]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

aten = torch.ops.aten
MATRIX_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
EXPENSIVE = frozenset(
    {
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""Attention without its matrix of scores, whose second run costs a whole forward of it, and convolutions."""


def recompute(name: str, module: nn.Module, forward: Forward, contexts: Contexts = noop_context_fn) -> Forward:
    """`forward` of `module` so that its backward runs it a second time; without gradients it is just `forward`.

    Gradients are bitwise those of `forward`, which may draw from the global generators of torch, python and numpy,
    count in buffers and set attributes: the second run finds all of it as the first did, and leaves no trace. What
    `forward` does elsewhere (a file, a global, a generator or a list that somebody else holds) happens twice.

    Args:
        name: of the module, for messages.
        contexts: makes the contexts of the first and of the second run; `selective` keeps what is expensive.

    Raises (when called, or in the backward):
        LayoutError: the forward changes its inputs in place, or saves fewer tensors the second time, or somebody
            changes a large buffer before the backward.
    """
    return functools.wraps(forward)(_Recomputed(name, module, forward, contexts))


def watch_again(module: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Make every run of `module`'s forward after the first inside of `around()`, if it is one of `recompute`.

    Returns:
        What takes it away.
    """
    forward: Any = module.forward
    while forward is not None and not isinstance(forward, _Recomputed):
        forward = getattr(forward, "__wrapped__", None)  # offloading wraps it
    if forward is None:
        return lambda: None
    forward.around = around

    def leave() -> None:
        forward.around = nullcontext

    return leave


def selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of `selective_in_graph`, for any number of backwards through one graph."""
    first, second, seen = _selective()
    return first, _Rewound(second, seen)


def selective_in_graph() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts that keep the results of expensive operations; one pair for each forward.

    Kept: attention (torch's fused kernels), convolutions, and of the matrix products the first, third, fifth ... of a
    block's forward. All others are computed again: in a Transformer those that end attention and feed-forward,
    and everything elementwise, which costs little for its bytes. Attention with dropout inside is not kept, because
    skipping it would leave the generator behind for what follows.

    Source: TorchTitan's policy for single operations (arXiv 2410.06511), which keeps every second product, too.
    """
    first, second, _ = _selective()
    return first, second


def _selective() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any], Counter[bool]]:
    """The contexts, and how many matrix products the first run (False) and the second (True) have met."""
    seen = Counter[bool]()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in MATRIX_PRODUCTS:
            seen[context.is_recompute] += 1
            keep = keeps_product(seen[context.is_recompute])
        else:
            keep = operation in EXPENSIVE and not _drops(operation, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, second, seen


@final
class _Recomputed:
    """A callable in place of a module's forward; the module itself, and so its names, stay as they are.

    Attributes:
        around: makes a context for every run after the first.
    """

    around: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, name: str, module: nn.Module, forward: Forward, contexts: Contexts) -> None:
        self._name = name
        self._module = module
        self._forward = forward
        self._contexts = contexts
        self._devices: tuple[torch.device, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        # Flat, because torch keeps tensors and finds devices among positional arguments only.
        leaves, structure = pytree.tree_flatten((args, kwargs))
        versions = [_version(leaf) for leaf in leaves]
        state, drawn = ModuleState(self._name, self._module), PlainGenerators()
        given = [(args, kwargs)]

        def run(*leaves: Any) -> Any:
            # The first run gets the caller's own containers, a later one what was in them then.
            if given:
                args, kwargs = given.pop()
                return self._forward(*args, **kwargs)
            args, kwargs = pytree.tree_unflatten(list(leaves[: structure.num_leaves]), structure)
            with self.around():
                return self._forward(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, again = self._contexts()
            return first, _Again(self._name, state, drawn, again)

        with set_checkpoint_early_stop(True):  # by that `_Again` knows a run that has saved all
            kept = InContext(run, is_first=True)
            output = checkpoint(kept, *leaves, *self._told_devices(), use_reentrant=False, context_fn=contexts)
        if [_version(leaf) for leaf in leaves] != versions:
            raise LayoutError(
                f"block {self._name} changes its input in place, so that its activations cannot be computed again: "
                "use inplace=False there, or recompute=none"
            )
        state.settle()
        return output

    def _told_devices(self) -> list[torch.Tensor]:
        """Of a block on several devices an empty tensor on each: torch keeps the generators of those that it sees."""
        if self._devices is None:
            self._devices = tuple({parameter.device: None for parameter in self._module.parameters()})
        return [torch.empty(0, device=device) for device in self._devices] if len(self._devices) > 1 else []


@final
class _Again:
    """The context of every run after the first; entered once for each backward through the same graph."""

    def __init__(
        self, name: str, state: ModuleState, drawn: PlainGenerators, inner: AbstractContextManager[Any]
    ) -> None:
        self._name = name
        self._state, self._drawn = state, drawn
        self._inner = inner

    def __enter__(self) -> None:
        self._stack = ExitStack()
        # Outside of the inner context, which counts every operation.
        self._stack.enter_context(self._state.put_back())
        self._stack.enter_context(self._drawn.put_back())
        self._stack.enter_context(self._inner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._stack.__exit__(kind, error, trace)
        if error is None:  # torch ends a run, by an exception, with the last tensor that the first one has saved
            raise LayoutError(
                f"block {self._name} saves fewer tensors in its second run than in its first: something outside of it "
                "has changed in between (a cache of keys and values: use_cache=False in training), so that its "
                "activations cannot be computed again; leave that out, or use recompute=none"
            )
        if isinstance(error, RuntimeError) and "has been mutated" in str(error):
            raise LayoutError(
                f"block {self._name} changes in place what recompute=selective keeps: use inplace=False there, or "
                "recompute=full"
            ) from error


@final
class _Rewound:
    """The context of later runs, each of which finds all that the first has kept: torch forgets what it has given out.

    Each of them counts its matrix products from the first on, in `seen`.

    It lives as long as the graph of its block, and lets go of what is kept with it.
    """

    def __init__(self, inner: Any, seen: Counter[bool]) -> None:
        self._inner, self._seen = inner, seen
        self._kept: dict[Any, Any] | None = None

    def __enter__(self) -> None:
        storage = self._inner.storage
        if self._kept is None:
            self._kept = {key: copy(entries) for key, entries in storage.items()}
        storage.update({key: copy(entries) for key, entries in self._kept.items()})
        del self._seen[True]
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)


def _version(leaf: Any) -> int | None:
    # Inference tensors have no version, and no operation changes them in place.
    return leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else None


def _drops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention kernel drops, by the argument that its schema calls dropout_p."""
    if not isinstance(operation, OpOverload):
        return False
    names = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", 0.0))
