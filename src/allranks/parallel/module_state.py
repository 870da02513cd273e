"""What a forward finds in a module besides its parameters, so that a second run of it finds the same.

A forward may count in a buffer, put another tensor in its place, or set an attribute. A recomputation that ran on what
is left would count twice and, where the forward reads what it wrote, compute something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, final

import torch
from torch import nn

from allranks.errors import LayoutError

_MISSING = object()
# Up to this size a buffer is always kept as a copy. Beyond it the version counter tells whether it was written to. Some
# kernels forget to move that (BatchNorm's does), on statistics that are small.
SMALL_BYTES = 2**16
# Containers that have their own bookkeeping: buffers here, parameters in FSDP, which puts gathered ones in.
_NOT_ATTRIBUTES = ("_buffers", "_parameters", "_modules")


@dataclass(slots=True)
class _Buffer:
    """A buffer as a forward found it.

    Attributes:
        value: None while `tensor` still holds it.
    """

    tensor: torch.Tensor
    version: int
    value: torch.Tensor | None

    def unchanged(self) -> bool:
        return self.tensor._version == self.version


@final
class ModuleState:
    """Buffers and attributes of a module and all below it, as they were before one forward of it.

    Made before that forward; `settle` is called after it, and `put_back` around each later run. Between the two only
    what is small (`SMALL_BYTES`) or what the forward has changed is held twice. Lists and dicts that an attribute names
    are not looked into.

    Args:
        name: of the module, for messages.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._members = list(module.modules())
        self._buffers = [{leaf: _keep(b) for leaf, b in member._buffers.items()} for member in self._members]
        self._attributes = [dict(vars(member)) for member in self._members]

    def settle(self) -> None:
        """After the forward: let go of what it left alone."""
        self._attributes = [
            changed_attributes(before, member) for member, before in zip(self._members, self._attributes, strict=True)
        ]
        for member, before in zip(self._members, self._buffers, strict=True):
            for leaf, buffer in before.items():
                if buffer is not None and buffer.tensor.nbytes > SMALL_BYTES and buffer.unchanged():
                    # One that another tensor has replaced still holds its value itself.
                    buffer.value = None if member._buffers.get(leaf) is buffer.tensor else buffer.tensor.detach()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Buffers and attributes as before the forward inside; afterwards as they are now.

        LayoutError where somebody else has changed a buffer since the forward, which left it alone: its value then is
        nowhere any more.
        """
        buffers = [dict(member._buffers) for member in self._members]
        attributes = [
            {name: vars(member).get(name, _MISSING) for name in changed}
            for member, changed in zip(self._members, self._attributes, strict=True)
        ]
        copies: dict[int, torch.Tensor] = {}
        earlier = [self._earlier(before, now, copies) for before, now in zip(self._buffers, buffers, strict=True)]
        try:
            self._put(earlier, self._attributes)
            yield
        finally:
            self._put(buffers, attributes)

    def _earlier(
        self,
        before: dict[str, _Buffer | None],
        now: dict[str, torch.Tensor | None],
        copies: dict[int, torch.Tensor],
    ) -> dict[str, torch.Tensor | None]:
        """The buffers of one module before the forward; copies, because the second run may write into them."""
        found: dict[str, torch.Tensor | None] = {}
        for leaf, buffer in before.items():
            if buffer is None:
                found[leaf] = None
            elif buffer.value is not None:
                # one copy each: a buffer may belong to several modules
                found[leaf] = copies.setdefault(id(buffer.tensor), buffer.value.clone())
            elif now.get(leaf) is buffer.tensor and buffer.unchanged():
                found[leaf] = buffer.tensor
            else:
                raise LayoutError(
                    f"buffer {leaf} of block {self._name} is changed between its forward and its backward, so that "
                    "its activations cannot be computed again: recompute=none"
                )
        return found

    def _put(self, buffers: list[dict[str, torch.Tensor | None]], attributes: list[dict[str, Any]]) -> None:
        for member, some, values in zip(self._members, buffers, attributes, strict=True):
            if some or member._buffers:
                member._buffers.clear()
                member._buffers.update(some)
            put_attributes(member, values)


def _keep(buffer: torch.Tensor | None) -> _Buffer | None:
    return None if buffer is None else _Buffer(buffer, buffer._version, buffer.detach().clone())


def changed_attributes(before: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """What of `before`, a copy of vars(module), is no longer the same object there, for `put_attributes`."""
    after = vars(module)
    if len(before) == len(after) and all(map(is_, before.values(), after.values())):
        return {}  # as nearly always: a name that comes anew comes last
    names = [name for name in {**before, **after} if name not in _NOT_ATTRIBUTES]
    return {
        name: before.get(name, _MISSING)
        for name in names
        if before.get(name, _MISSING) is not after.get(name, _MISSING)
    }


def put_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    """The attributes as `changed_attributes` found them; names that were not there go."""
    for name, value in values.items():
        if value is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
