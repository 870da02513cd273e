"""Where a number that is not finite is first seen in a forward and backward: hooks for a pass that is made for it.

Every look waits for the device, so this is no part of a step. An infinity below zero is none in a forward: masks are
made of them. Of what passes through several ranks, several may see it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allranks.parallel.replicate import REPLICAS

Kind = Literal["input", "output", "output_gradient", "parameter_gradient"]
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@final
@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen first: `name` is the logical name of a module, or of a parameter; "" is the whole model."""

    kind: Kind
    name: str
    type: str = ""


@final
class FirstNonfinite:
    """Watches one pass.

    Attributes:
        found: what was seen first on this rank; None so far.
    """

    def __init__(self) -> None:
        self.found: Sighting | None = None
        self._handles: list[Any] = []

    @contextmanager
    def watching(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Inside, every forward and backward of these modules is looked at."""
        try:
            for which, module in modules.items():
                inner = module.module if isinstance(module, (*REPLICAS, nn.DataParallel)) else module
                for name, part in inner.named_modules():
                    self._watch(_join(which, name), part, root=not name)
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def _watch(self, name: str, part: nn.Module, *, root: bool) -> None:
        before, after = partial(self._before, name, root), partial(self._after, name)
        self._handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(part.register_forward_hook(after))

    def _before(self, name: str, root: bool, part: nn.Module, args: Any, kwargs: Any) -> None:
        if root:
            for tensor in _floating((args, kwargs)):
                self._see(Sighting("input", name), tensor, forward=True)
        if not torch.is_grad_enabled():
            return
        # Looked up now: of a sharded module these are the gathered ones.
        for leaf, parameter in part._parameters.items():
            if parameter is not None and parameter.requires_grad:
                seen = Sighting("parameter_gradient", _join(name, leaf), type(part).__name__)
                self._handles.append(parameter.register_hook(partial(self._see, seen)))

    def _after(self, name: str, part: nn.Module, args: Any, output: Any) -> None:
        for tensor in _floating(output):
            self._see(Sighting("output", name, type(part).__name__), tensor, forward=True)
            if tensor.requires_grad:
                seen = Sighting("output_gradient", name, type(part).__name__)
                self._handles.append(tensor.register_hook(partial(self._see, seen)))

    @torch.no_grad()
    def _see(self, seen: Sighting, tensor: torch.Tensor, *, forward: bool = False) -> None:
        if self.found is None and _is_bad(tensor, forward=forward):
            self.found = seen


def _is_bad(tensor: torch.Tensor, *, forward: bool) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if forward:
        return bool((local.isnan() | local.isposinf()).any())
    return not bool(local.isfinite().all())


def _floating(values: object) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _join(which: str, name: str) -> str:
    for wrapper in WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return ".".join(filter(None, (which, name)))
