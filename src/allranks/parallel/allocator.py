"""What the allocators of memory are told before anything is allocated: a processor's and CUDA's."""

import os

import torch

from allranks.parallel.heap import keep_heap
from allranks.verdict import Decision

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_UNSUPPORTED = "operation not supported"  # CUDA_ERROR_NOT_SUPPORTED, in the words of cuda.h


def keep_memory(device: torch.device) -> bool:
    """Before anything is allocated; whether segments of a GPU's memory grow because of it.

    On the CPU the process keeps the memory that it has freed from now on.
    """
    if device.type != "cuda":
        keep_heap()
    elif not any(name in os.environ for name in VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        return True
    return False


def prove_growth(device: torch.device) -> Decision | None:
    """After a GPU is taken whose segments are to grow: see that it can do that, or let them be as torch has them.

    Some virtual GPUs map no memory page by page, and fail at the first allocation. What else is wrong with a device
    shows where it is used.
    """
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if _UNSUPPORTED in str(error).lower():
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
            return Decision("segments of GPU memory do not grow", f"{device} does not map memory page by page")
    return None
