"""Messages between two processes that share a GPU, of tensors on that GPU: through the host's memory, as gloo does not.

Of a GPU's tensors gloo carries collectives, by copies in the host's memory, but no message from one rank to another:
there it hands the GPU's address to the socket, which knows no such address (torch 2.11, ProcessGroupGloo.cpp, send).
NCCL carries them, and takes one process a GPU. So a pipeline, or a ring, of processes that share one comes here;
torch's own pipelines send from several places, hence at the one that all of them pass.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

_Message = Callable[..., dist.Work]


def carry_messages(device_type: str = "cuda") -> Callable[[], None]:
    """From here on what lies on this kind of device is sent from a copy in the host's memory, and received into one.

    For processes whose groups are all of gloo.

    Returns:
        What ends it.
    """
    kind: Any = dist.ProcessGroup
    own = {name: vars(kind)[name] for name in ("send", "recv")}  # as getattr gives them, they would bind no more
    send: _Message = kind.send
    receive: _Message = kind.recv

    def send_copy(group: dist.ProcessGroup, tensors: list[torch.Tensor], *peer_and_tag: int) -> dist.Work:
        copies = [tensor.to("cpu", copy=True) if tensor.device.type == device_type else tensor for tensor in tensors]
        return send(group, copies, *peer_and_tag)

    def receive_copy(group: dist.ProcessGroup, tensors: list[torch.Tensor], *peer_and_tag: int) -> Any:
        if all(tensor.device.type != device_type for tensor in tensors):
            return receive(group, tensors, *peer_and_tag)
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return _Arriving(receive(group, copies, *peer_and_tag), copies, tensors)

    kind.send, kind.recv = send_copy, receive_copy

    def end() -> None:
        for name, method in own.items():
            setattr(kind, name, method)

    return end


@final
class _Arriving:
    """What waits for a message, and brings it to where it belongs."""

    def __init__(self, work: dist.Work, copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
        self._work, self._pairs = work, list(zip(copies, tensors, strict=True))

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._work.is_completed())

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Until it is there; true, as torch's."""
        arrived = bool(self._work.wait(timeout))
        while self._pairs:
            copy, tensor = self._pairs.pop()
            with torch.no_grad():  # torch 2.11's stages receive into leaves
                tensor.copy_(copy)
        return arrived
