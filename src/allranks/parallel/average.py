"""The sum or mean over ranks of gradients that nobody has reduced in the backward.

What no rank's loss has reached has no gradient, as on one device: zeros would let weight decay and momentum move it.
So it travels with each gradient whether a rank has one.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

PARCEL_BYTES = 1 << 28
"""Of the copy in which gradients travel together: one of all would be as large as they are."""
TOGETHER = 1 << 18
"""Elements from which on a gradient travels by itself: the others are copied together, and back."""


def average_gradients(
    parameters: Sequence[torch.Tensor],
    groups: Sequence[dist.ProcessGroup | None],
    divisor: int,
    device: torch.device | None = None,
    *,
    used: bool = False,
) -> None:
    """Sum every `.grad` over `groups`, one after the other, and divide by `divisor`; collective.

    A missing gradient counts as zero, and is the mean afterwards; missing on all ranks it stays so. Of a DTensor this
    rank's part is meant. The sums travel on `device`, by default where the gradients are, in one reduction for
    what is `alike`.

    Args:
        used: whether some rank is known to have each of them, alike on all ranks: then nothing is asked.
    """
    missing = [parameter.grad is None for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in found]
    for places in parcels(gradients):
        some, lacking = [gradients[at] for at in places], [missing[at] for at in places if not used]
        flags = tell_gradients(lacking, some[0])
        flat = torch.cat([*(gradient.reshape(-1) for gradient in some), flags]).to(device)
        for group in groups:
            dist.all_reduce(flat, group=group)
        flat /= divisor
        *parts, flags = flat.split([*(gradient.numel() for gradient in some), len(lacking)])
        for gradient, part in zip(some, parts, strict=True):
            gradient.copy_(part.view(gradient.shape))
        take_back([parameters[at] for at in places if not used], lacking, flags)


def parcels(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The places of tensors that travel in one message: what is `alike`, so many that their copy stays small."""
    found: list[list[int]] = []
    for places in alike(tensors):
        size = 0
        for place in places:
            if not size or size + tensors[place].nbytes > PARCEL_BYTES:
                found.append([])
                size = 0
            found[-1].append(place)
            size += tensors[place].nbytes
    return found


def take_from_first(parameters: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace every `.grad` by that of the group's first rank, all of whose ranks have the same ones; collective.

    Of a DTensor this rank's part is meant. What is small travels together.
    """
    found = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [gradient._local_tensor if isinstance(gradient, DTensor) else gradient for gradient in found]
    small = [gradient for gradient in gradients if gradient.numel() < TOGETHER]
    for places in alike(small):
        some = [small[at] for at in places]
        flat = torch.cat([gradient.reshape(-1) for gradient in some])
        dist.broadcast(flat, group=group, group_src=0)
        for gradient, part in zip(some, flat.split([gradient.numel() for gradient in some]), strict=True):
            gradient.copy_(part.view(gradient.shape))
    for gradient in gradients:
        if gradient.numel() >= TOGETHER:
            whole = gradient.contiguous()
            dist.broadcast(whole, group=group, group_src=0)
            if whole is not gradient:
                gradient.copy_(whole)


def alike(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """The places of tensors that one message can carry: of one dtype, and on one device of those of a placement."""
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(place)
    return list(places.values())


def tell_gradients(missing: Sequence[bool], like: torch.Tensor) -> torch.Tensor:
    """[parameters] One where this rank has a gradient, else zero, of the dtype and on the device of `like`.

    To be summed over the ranks. The host does not wait for the device.
    """
    flags = like.new_ones(len(missing))
    for at, lacks in enumerate(missing):
        if lacks:
            flags[at].zero_()
    return flags


def take_back(parameters: Sequence[torch.Tensor], missing: Sequence[bool], flags: torch.Tensor) -> None:
    """Let those of `parameters` have no gradient for which no rank had one.

    The host waits for the device only on a rank that lacks one: it alone needs to know of the others.

    Args:
        missing: for each, whether this rank had none.
        flags: the sums, or means, over the ranks of what `tell_gradients` told.
    """
    if not any(missing):
        return
    # A rehearsal has one rank, and no numbers: the others lack what it does.
    fake = isinstance(flags, FakeTensor)
    anyone = [not lacks for lacks in missing] if fake else [count > 0 for count in flags.tolist()]
    for parameter, had in zip(parameters, anyone, strict=True):
        if not had:
            parameter.grad = None
