"""How much memory a loop needs at the peak of a step, good to a few hundred kilobytes.

On CUDA torch's allocator counts itself. On the CPU glibc's does, for all threads, but keeps no peak: so it is asked
after every operation that torch dispatches. (The profiler's events lack what gloo's threads give back, which differs
from run to run; resident memory lacks what the allocator keeps.) This slows a step: nothing is timed meanwhile.
"""

import ctypes
import gc
from types import TracebackType
from typing import Any, Self, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Mallinfo2(ctypes.Structure):
    """glibc's own count: `struct mallinfo2` of malloc.h (glibc 2.33)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def allocated_bytes() -> int:
    """What this process has asked of the allocator and not given back; 0 where the system does not tell."""
    if _mallinfo2 is None:
        return 0
    found = _mallinfo2()
    return int(found.hblkhd + found.uordblks)


@final
class MemoryWatch:
    """Of what is made from now on; as a context, around the step whose peak counts."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with _Sampler():  # what torch imports for the first one is nobody's
            torch.zeros(1).add(1)
        self._sampler = _Sampler()
        gc.collect()
        self._before = self._held()

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._sampler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type != "cuda":
            self._sampler.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def peak_bytes(self) -> int:
        """The most during the step, less what was there before; 0 where the system does not tell."""
        cuda = self._device.type == "cuda"
        highest = torch.cuda.max_memory_allocated(self._device) if cuda else self._sampler.highest
        return max(0, highest - self._before)

    def _held(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else allocated_bytes()


class _Sampler(TorchDispatchMode):
    """Asks after every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, allocated_bytes())
        return found
