"""How much memory this process has needed at most."""

import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes(*devices: torch.device) -> int:
    """The most memory needed so far where the model lives: on CUDA what torch allocated, else the RSS.

    Args:
        devices: all of this process; the fullest one counts.
    """
    allocated = [torch.cuda.max_memory_allocated(device) for device in devices if device.type == "cuda"]
    return max(allocated) if allocated else peak_rss_bytes()


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far (VmHWM).

    Source: /proc/self/status where it tells (gVisor's does not). Not getrusage there: its maximum survives exec, so
    that a small program started by a large one would report the large one's.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        status = ""
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    if line is not None:
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
