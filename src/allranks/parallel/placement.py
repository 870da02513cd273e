"""Modules on several devices of one process: each computes where its parameters lie, and what it needs comes to it.

A module that lies on one device gets its arguments there, and leaves its output there: from one block to the next a
tensor travels only where their devices differ. What the code between such modules computes (a residual sum, a
concatenation) is computed where its largest tensor lies, the first of equal ones. What the model returns goes to the
device of batch and loss.

The user's own forward runs as it stands; a `forward` attribute of the module stands before it, as block modes have it.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from allranks.parallel.share import Place, Share
from allranks.parallel.transfers import Transfers

# They say themselves where their result lies.
_LEFT_ALONE = {torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.backward}

_WRITTEN = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_INPLACE = {"__setitem__", *(f"__i{name}__" for name in _WRITTEN)}

Modules = Mapping[str, nn.Module]


@final
class Placement:
    """Which tensor of the modules lies on which device, and the ways between them.

    Args:
        modules: the user's, by name, as they were built.
        places: logical name of every parameter and buffer -> its device.
    """

    def __init__(self, modules: Modules, share: Share, places: Mapping[str, Place]) -> None:
        self.share = share
        self.transfers = Transfers(share)
        self.by_parameter: Mapping[int, Place] = {}
        self.places = places
        self._modules = modules
        self._tensors = dict(named_tensors(modules))
        self._by_id = {id(tensor): places[name] for name, tensor in self._tensors.items()}
        self._state = threading.local()
        self.whole: dict[str, tuple[nn.Module, Place]] = {}
        self._split: dict[str, nn.Module] = {}
        for which, module in modules.items():
            self._sort(which, module)
        for name, module in self._split.items():
            module.forward = self._aligned(module.forward, name)

    @property
    def num_bytes(self) -> dict[Place, int]:
        """Bytes of parameters and buffers on each device in use, a shared one once."""
        found: dict[Place, int] = {}
        for tensor in {id(tensor): tensor for tensor in self._tensors.values()}.values():
            place = self._by_id[id(tensor)]
            found[place] = found.get(place, 0) + tensor.nbytes
        return {place: found[place] for place in self.share.places if place in found}

    def is_split(self, name: str) -> bool:
        """Whether the parts of a module, by its logical name, lie on several devices."""
        return name in self._split

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Where a parameter or buffer goes, as it was built."""
        return self._by_id[id(tensor)].device

    def recorded(self) -> Any:
        """A context: the transfers made inside it."""
        return self.transfers.recorded()

    def finish(self) -> None:
        """After every tensor has its place and every block its mode: let the modules find what they need."""
        tensors = dict(named_tensors(self._modules))
        for name, tensor in tensors.items():
            self.transfers.note(tensor, self.places[name])
        self.by_parameter = {id(tensor): self.places[name] for name, tensor in tensors.items()}
        for name, (module, place) in self.whole.items():
            module.forward = self._on(place, module.forward, name)
        for which, module in self._modules.items():
            module.forward = self._ending_at_home(module.forward, which)

    def _sort(self, name: str, module: nn.Module) -> None:
        """Modules that lie on one device, the outermost of them; and those that hold parts on several."""
        owned = (*module.parameters(), *module.buffers())
        places = {self._by_id[id(tensor)] for tensor in owned}
        if not places or name in self.whole or name in self._split:
            return
        called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
        known = [other for other, _ in self.whole.values()] + list(self._split.values())
        if any(module is other for other in known):
            return
        if called and len(places) == 1:
            self.whole[name] = (module, places.pop())
            return
        if called:
            self._split[name] = module
        for leaf, child in module.named_children():
            self._sort(f"{name}.{leaf}" if name else leaf, child)

    def _on(self, place: Place, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._paused():
                args, kwargs = self.transfers.carry((args, kwargs), place, name)
                output = forward(*args, **kwargs)
                self.transfers.note(output, place)
            return output

        return call

    def _aligned(self, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Within another one the mode is on, but where a block is computed again in the backward.
            if isinstance(_get_current_function_mode(), _Aligned):
                return forward(*args, **kwargs)
            with _Aligned(self.transfers, name):
                return forward(*args, **kwargs)

        return call

    def _ending_at_home(self, forward: Callable[..., Any], which: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.transfers.carry(forward(*args, **kwargs), self.share.home, which)

        return call

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """What lies on one device needs no look at each operation."""
        if not isinstance(_get_current_function_mode(), _Aligned):
            yield
            return
        with _pop_mode_temporarily():
            yield


class _Aligned(TorchFunctionMode):
    """Inside, an operation whose tensors lie on several devices runs where its largest does, or what it writes to."""

    def __init__(self, transfers: Transfers, name: str) -> None:
        super().__init__()
        self._transfers = transfers
        self._name = name

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return func(*args, **given)
        place = self._transfers.locate(tensors[0] if _changes_first(func) else max(tensors, key=_size))
        if len(tensors) > 1 and func not in _LEFT_ALONE:
            args, given = self._transfers.carry((args, given), place, self._name)
        result = func(*args, **given)
        self._transfers.note(result, place)
        return result


def _size(tensor: torch.Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _changes_first(func: Callable[..., Any]) -> bool:
    """Whether an operation writes into its first tensor: `add_`, `x += y`, `x[i] = y`; of these names no other does."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _INPLACE


def named_tensors(modules: Modules) -> Iterator[tuple[str, torch.Tensor]]:
    """(logical name, parameter or buffer), shared ones under each name."""
    for which, module in modules.items():
        prefix = f"{which}." if which else ""
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield prefix + name, parameter
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield prefix + name, buffer
