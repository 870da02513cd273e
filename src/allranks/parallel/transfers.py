"""Tensors on their way between the devices of one process. Every transfer goes through `Transfers.carry`.

The gradient of what was carried goes the same way back. On the CPU, where several devices are names for one memory, a
transfer makes a copy as one between two devices does, and which device a tensor lies on is noted beside it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from allranks.parallel.share import Place, Share


@final
@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor on its way.

    Attributes:
        module: which needed it elsewhere; "" is the model itself.
        num_bytes: of the tensor.
        source, target: names of the devices, as rules have them.
        backward: whether it is a gradient.
    """

    module: str
    num_bytes: int
    source: str
    target: str
    backward: bool = False


@final
class Transfers:
    """Where the tensors of a process lie, and the one way from device to device."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._by_device = {place.device: place for place in share.places if place.device.type != "cpu"}
        self._cpu = share.home if share.home.device.type == "cpu" else share.find("cpu")
        self._noted: Any = WeakIdKeyDictionary()
        self._copies: Any = WeakIdKeyDictionary()
        self._records: list[Transfer] | None = None

    @contextmanager
    def recorded(self) -> Iterator[Sequence[Transfer]]:
        """The transfers made inside, backward ones too."""
        outer, self._records = self._records, []
        try:
            yield self._records
        finally:
            self._records = outer

    def locate(self, tensor: torch.Tensor) -> Place:
        """Where it lies; a tensor of the CPU that nobody has noted lies where batches do."""
        if tensor.device.type != "cpu":
            return self._by_device.get(tensor.device) or Place(str(tensor.device), tensor.device)
        found: Place = self._noted.get(tensor, self._cpu)
        return found

    def note(self, value: object, place: Place) -> None:
        """Every tensor of the CPU in `value`, any pytree, lies there."""
        if place.device.type == "cpu":
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor):
                    self._noted[leaf] = place

    def carry(self, value: Any, place: Place, module: str) -> Any:
        """`value`, any pytree, with its tensors on `place`; the same object where they are there already."""
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if all(self.locate(leaf) == place for leaf in leaves):
            return value
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._carry(tensor, place, module), value)

    def _carry(self, tensor: torch.Tensor, place: Place, module: str) -> torch.Tensor:
        source = self.locate(tensor)
        if source == place:
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            moved: torch.Tensor = _Carried.apply(tensor, self, source, place, module)  # type: ignore[no-untyped-call]
            self.note(moved, place)
            return moved
        # A mask or a table that several modules get travels once; a parameter's copy would stay in memory.
        kept = None if isinstance(tensor, nn.Parameter) or tensor.is_inference() else self._copies.get(tensor)
        if kept is not None and kept[0] == tensor._version and place in kept[1]:
            copy: torch.Tensor = kept[1][place]
            return copy
        moved = self._copy(tensor, Transfer(module, tensor.nbytes, source.name, place.name), place)
        self.note(moved, place)
        if not isinstance(tensor, nn.Parameter) and not tensor.is_inference():
            copies = kept[1] if kept is not None and kept[0] == tensor._version else {}
            self._copies[tensor] = (tensor._version, {**copies, place: moved})
        return moved

    def _copy(self, tensor: torch.Tensor, transfer: Transfer, place: Place) -> torch.Tensor:
        if self._records is not None:
            self._records.append(transfer)
        if tensor.device == place.device:
            return tensor.clone()
        # To the host only a copy that is waited for is safe.
        return tensor.to(place.device, non_blocking=place.device.type != "cpu")


class _Carried(torch.autograd.Function):
    """A tensor on another device, whose gradient comes back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, transfers: Transfers, source: Place, target: Place, module: str
    ) -> torch.Tensor:
        transfer = Transfer(module, tensor.nbytes, source.name, target.name)
        ctx.way = transfers, source, replace(transfer, source=target.name, target=source.name, backward=True)
        return transfers._copy(tensor, transfer, target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        transfers, source, back = ctx.way
        returned = _Returned.apply(gradient, transfers, source, back)  # type: ignore[no-untyped-call]
        return returned, None, None, None, None


class _Returned(torch.autograd.Function):
    """The gradient on its way back; a gradient of this one (a gradient penalty) goes there again."""

    @staticmethod
    def forward(
        ctx: Any, gradient: torch.Tensor, transfers: Transfers, target: Place, transfer: Transfer
    ) -> torch.Tensor:
        ctx.way = transfers, transfers.share.find(transfer.source), transfer
        return transfers._copy(gradient, replace(transfer, num_bytes=gradient.nbytes), target)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        transfers, target, transfer = ctx.way
        again = replace(transfer, source=transfer.target, target=transfer.source, num_bytes=gradient.nbytes)
        return transfers._copy(gradient, again, target), None, None, None
