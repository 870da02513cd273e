"""The copy that a checkpoint is written from while the training goes on: in host memory, made once and used again.

The loop waits for as long as the copy takes on the CPU. From a CUDA device the copies only join the stream: they take
what the parameters are at that point of it, before any later step changes them, and the host goes on.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch

from allranks import fault_points
from allranks.checkpointing.portion import Portion, digests_of
from allranks.errors import CheckpointError
from allranks.units import format_bytes


@final
class Stage:
    """Host memory for a copy of one rank's portion, as large as what this rank writes; pinned where that lies on a
    CUDA device.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

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
            mine = [(entry, self._copy(entry.name, entry.box.offset, tensor)) for entry, tensor in portion.mine]
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"no memory for a copy of {format_bytes(portion.num_bytes)} to write from: "
                f"{str(error).splitlines()[0]:.200}; give checkpoint.asynchronous=false"
            ) from error
        return replace(portion, mine=mine, digests=digests), _waiting(portion)

    def _copy(self, name: str, offset: tuple[int, ...], tensor: torch.Tensor) -> torch.Tensor:
        known = self._memory.get((name, offset))
        if known is None or (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            known = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._memory[name, offset] = known
        return known.copy_(tensor.detach(), non_blocking=True)


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
