"""Memory that a step gives back, and needs again in the next one, stays with the process.

glibc returns the free end of its heap to the system, and maps large tensors one by one: a step, which drops gradients
and activations, and a sharded one its units, too, then has its pages made and cleared anew every time.

Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
"""

import ctypes
import os
from typing import Final

_TRIM_THRESHOLD: Final = -1  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_MMAP_THRESHOLD: Final = -3
_NEVER: Final = 2**31 - 1
_LARGEST: Final = 32 * 1024 * 1024  # of glibc: what is larger is always mapped


def keep_heap() -> bool:
    """From now on free memory of this process's heap is kept for it; what is free now goes back to the system first.

    Returns False, and changes nothing, where the C library is not glibc or its environment variables say what to do.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("mallopt", "malloc_trim", "gnu_get_libc_version")):
        return False
    library.malloc_trim(0)
    return all((library.mallopt(_MMAP_THRESHOLD, _LARGEST), library.mallopt(_TRIM_THRESHOLD, _NEVER)))
