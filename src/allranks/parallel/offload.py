"""Activations that wait for the backward in the host's memory.

Each block's saved tensors are copied to pinned memory while the next block computes, and come back one block ahead of
the backward, both on a stream of their own. Source: torch.autograd.graph.saved_tensors_hooks, and the double buffering
of torchtune's OffloadActivations.

What an operation has saved must not be written to before the backward. Autograd refuses such programs; under these
hooks it no longer looks, so what stays on the device is watched here. What is moved is safe once its copy is made.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., Any]

SMALLEST_BYTES = 2**20
"""What is smaller stays: starting its two copies would cost more than its bytes are worth."""
MOVED: tuple[type[torch.Tensor], ...] = (torch.Tensor,)
"""Types of what is moved: of a class of somebody's own nobody knows what a copy of its memory would be."""


@final
class Offloader:
    """Moves what blocks save to the host and back; one for all blocks of a device.

    Args:
        device: whose tensors are moved. On the CPU the copies are made at once, in the same memory: for tests.
        smallest_bytes: what is smaller stays where it is.
    """

    def __init__(self, device: torch.device, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self.device = device
        self.smallest_bytes = smallest_bytes
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.newest: weakref.ref[_Block] | None = None

    def offload(self, module: nn.Module, forward: Forward) -> Forward:
        """`forward` of `module` whose saved tensors wait in the host's memory; parameters are kept anyway, and stay."""

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
            block = _Block(self, kept)
            with saved_tensors_hooks(block.pack, _unpack):
                output = forward(*args, **kwargs)
            return output

        return call


@final
class _Block:
    """What one forward of one block has saved. Lives as long as one of its tensors waits."""

    def __init__(self, offloader: Offloader, kept: set[int]) -> None:
        self._offloader = offloader
        self._kept = kept
        # Weak in both directions but one (a tensor holds its block): a graph that nobody holds takes all with it.
        self._before = offloader.newest
        self._waiting: list[weakref.ref[_Waiting]] = []
        offloader.newest = weakref.ref(self)

    def pack(self, tensor: torch.Tensor) -> "_Staying | _Waiting":
        """Begin the copy to the host, if it is worth it."""
        own = self._offloader
        moves = (
            tensor.device.type == own.device.type
            and tensor.nbytes >= own.smallest_bytes
            and type(tensor) in MOVED
            # An expanded one would take its full size there.
            and tensor.untyped_storage().nbytes() >= tensor.nbytes
            and tensor.untyped_storage()._cdata not in self._kept
        )
        if not moves:
            # Detached: an operator's output knows the node that saves it here, and neither would ever be freed where
            # no backward comes. The count of writes is shared.
            return _Staying(tensor.detach(), tensor._version)
        waiting = _Waiting(self, tensor, own.stream)
        self._waiting.append(weakref.ref(waiting))
        return waiting

    def fetch(self) -> None:
        """Begin the copies of all of its tensors back to the device."""
        for reference in reversed(self._waiting):
            waiting = reference()
            if waiting is not None:
                waiting.fetch()
        self._waiting.clear()

    def fetch_before(self) -> None:
        """The same for the block whose forward came before: its backward is the next one."""
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()


@final
class _Waiting:
    """One saved tensor in the host's memory."""

    def __init__(self, block: _Block, tensor: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self.block = block
        self._device = tensor.device
        self._stream = stream
        self._back: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._host = host_memory_like(tensor, pinned=stream is not None)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        # The allocator may give the memory to others when this stream, too, is done with it.
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Begin the copy back; it waits for nothing but the device's work so far."""
        if self._back is not None:
            return
        # Of the computing stream's memory: what frees it there is ordered behind what used it.
        self._back = device_memory_like(self._host, self._device)
        if self._stream is None:
            self._back.copy_(self._host)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._back.copy_(self._host, non_blocking=True)
            self._ready = self._stream.record_event()
        # It may be freed without ever having been waited for, in a backward that stops early.
        self._back.record_stream(self._stream)

    def take(self) -> torch.Tensor:
        """The tensor on its device, for the current stream; a copy stays in the host's memory for another backward."""
        self.fetch()
        back, self._back = self._back, None
        assert back is not None
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        return back


def host_memory_like(tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """The host's memory for a copy of `tensor`.

    In the same order (channels_last, transposed), so that kernels of the backward find what they expect.
    """
    return torch.empty_like(tensor, device="cpu", pin_memory=pinned)


def device_memory_like(waiting: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The device's memory for a copy of what waits on the host."""
    return torch.empty_like(waiting, device=device)


@final
@dataclass(frozen=True, slots=True)
class _Staying:
    """One saved tensor that was not worth the way."""

    tensor: torch.Tensor
    version: int


def _unpack(packed: _Staying | _Waiting) -> torch.Tensor:
    if isinstance(packed, _Staying):
        if packed.tensor._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{packed.tensor.type()} {list(packed.tensor.shape)}]"
            )
        return packed.tensor
    packed.block.fetch()
    tensor = packed.take()
    packed.block.fetch_before()
    return tensor
