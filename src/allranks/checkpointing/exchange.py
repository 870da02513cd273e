"""Bytes between the ranks of a group, as padded tensors: nothing is pickled, and all make the same calls."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from allranks.errors import ProcessError
from allranks.failure import is_of_peers

_CPU = torch.device("cpu")


@contextmanager
def among_peers(what: str) -> Iterator[None]:
    """Turn the backend's error at a lost peer into ours; want of memory and an error of the device stay what they are.

    Raises:
        ProcessError: a peer was lost.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_peers(error):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ProcessError(f"a peer was lost while {what}: {reason}") from error


def gather_bytes(data: bytes, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Every rank's `data` by rank in the group, on the group's first rank; an empty list elsewhere. No group: one
    process.

    `device` is where the group's backend wants its tensors; where it has gloo for the host's, too, the bytes stay there
    and take nothing of a GPU's memory. Raises ProcessError where a peer is lost.
    """
    if group is None:
        return [data]
    device = _place(group, device)
    with among_peers("a checkpoint's parts were collected"):
        first = dist.get_rank(group) == 0
        size = torch.tensor([len(data)], device=device)
        sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, size, group=group)
        lengths = [int(length) for length in torch.cat(sizes).tolist()]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = tensor_of(data)
        mine = mine.to(device)
        received = [torch.empty_like(mine) for _ in lengths] if first else None
        dist.gather(mine, received, group=group, group_dst=0)
    return [_bytes(part[:length]) for part, length in zip(received or (), lengths, strict=False)]


def broadcast_bytes(data: bytes, group: dist.ProcessGroup | None, device: torch.device) -> bytes:
    """The first rank's `data`, on every rank; others' is not looked at. As `gather_bytes` otherwise."""
    if group is None:
        return data
    device = _place(group, device)
    with among_peers("a checkpoint was committed"):
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, group=group, group_src=0)
        own = tensor_of(data) if dist.get_rank(group) == 0 else torch.empty(int(size.item()), dtype=torch.uint8)
        content = own.to(device)
        dist.broadcast(content, group=group, group_src=0)
    return _bytes(content)


def _place(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Where bytes between the ranks of a group lie: the same on all of them."""
    if device != _CPU and _CPU in group._device_types and group._get_backend(_CPU).name() == "gloo":
        return _CPU
    return device


def tensor_of(data: bytes) -> torch.Tensor:
    """A copy of the bytes, uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _bytes(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
