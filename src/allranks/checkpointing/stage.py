"""The copy that a checkpoint is written from while the training goes on: in host memory, made once and used again.

The loop waits for as long as the copy takes on the CPU. From a CUDA device the copies only join the stream: they take
what the parameters are at that point of it, before any later step changes them, and the host goes on.

It is one piece of memory. Torch's own allocator of pinned memory takes the next power of two for each tensor, up to
twice what is written.
"""

import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import final

import torch

from allranks import fault_points
from allranks.checkpointing.portion import Portion, digests_of
from allranks.errors import CheckpointError
from allranks.units import format_bytes

_ALIGNMENT = 64  # of each tensor in it, in bytes: as torch aligns what it allocates on a processor
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices of the process


@final
class Stage:
    """Host memory for a copy of one rank's portion, as large as what this rank writes; pinned where that lies on a
    CUDA device.

    Attributes:
        fits: whether all hosts have room for it; None: nobody has looked.
    """

    def __init__(self) -> None:
        self.fits: bool | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] = lambda: None

    def copy(self, portion: Portion, *, proves: bool = False) -> tuple[Portion, Callable[[], None]]:
        """The Portion with copies in place of live tensors, and a function that waits until they are there.

        The copies stay until the next call, which writes over them.

        Args:
            proves: whether digests are taken of the live tensors now, so that reading the file back proves the copy
                too; else they are computed of the copies, when these are written.

        Raises:
            CheckpointError: there is no memory for the copy.
        """
        fault_points.reach("background.copy")
        digests = digests_of(portion.mine) if proves else None
        try:
            places = self._places(portion)
            mine = [
                (entry, place.copy_(tensor.detach(), non_blocking=True))
                for (entry, tensor), place in zip(portion.mine, places, strict=True)
            ]
        except (MemoryError, OSError, RuntimeError) as error:
            raise CheckpointError(
                f"no memory for a copy of {format_bytes(portion.num_bytes)} to write from: "
                f"{str(error).splitlines()[0]:.200}; give checkpoint.asynchronous=false"
            ) from error
        return replace(portion, mine=mine, digests=digests), _waiting(portion)

    def _places(self, portion: Portion) -> list[torch.Tensor]:
        """For each tensor that is written, where its copy goes."""
        starts, end = list[int](), 0
        for _, tensor in portion.mine:
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if end > self._buffer.numel():
            self._unpin()
            self._buffer = torch.empty(0, dtype=torch.uint8)  # goes before the next one comes
            self._buffer = self._allocate(end, pinned=any(tensor.is_cuda for _, tensor in portion.mine))
        return [
            self._buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for start, (_, tensor) in zip(starts, portion.mine, strict=True)
        ]

    def _allocate(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """So much host memory. Where it cannot be pinned it is not, and the copies are waited for."""
        if not pinned:
            return torch.empty(num_bytes, dtype=torch.uint8)
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A process that is forked would share its pages: the next to write to one gets a copy, of which CUDA knows not.
        memory.madvise(mmap.MADV_DONTFORK)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, _PORTABLE)) == 0:
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, buffer.data_ptr())
            self._unpin.atexit = False
        else:
            with suppress(RuntimeError):  # CUDA tells of it again, to whoever starts the next kernel
                torch.ones(1, device="cuda")
        return buffer


def _waiting(portion: Portion) -> Callable[[], None]:
    """What waits for the copies that have just joined their devices' streams; on the CPU they are there already."""
    devices = {tensor.device for _, tensor in portion.mine if tensor.is_cuda}
    copied = [(device, torch.cuda.current_stream(device).record_event()) for device in devices]

    def wait() -> None:
        for device, event in copied:
            # In the thread that writes, device 0 is the current one: waiting would take memory there.
            with torch.cuda.device(device):
                event.synchronize()

    return wait
