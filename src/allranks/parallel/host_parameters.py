"""Parameters that wait in the host's memory: `offload=parameters`, and the half of `offload=all` that is about them.

FSDP2 keeps each rank's shards, their gradients and so the optimizer's state in pinned memory of the host. A unit's
shards come to the device to be gathered, and its reduced gradients go back; the update runs on the host's processor.
Source: torch.distributed.fsdp.CPUOffloadPolicy; ZeRO-Offload (arXiv 2101.06840).
"""

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.verdict import Decision


def choose_offload(layout: Layout, device: torch.device) -> OffloadPolicy:
    """FSDP2's part of `layout.offload` where the forward runs on `device`.

    Raises:
        LayoutError: the device is the CPU, whose memory is the host's.
    """
    if not layout.offloads_parameters:
        return OffloadPolicy()
    if not has_own_memory(device):
        raise LayoutError(
            f"offload={layout.offload} keeps parameters, gradients and the optimizer's state in the host's memory "
            "rather than an accelerator's, and this device is the CPU: there they are anyway; leave it out"
        )
    return CPUOffloadPolicy(pin_memory=device.type != "cpu")


def has_own_memory(device: torch.device) -> bool:
    """Whether there is a host's memory beside the device's."""
    return device.type != "cpu"


def describe_offload(layout: Layout) -> list[Decision]:
    """What is told of it at the start."""
    if not layout.offloads_parameters:
        return []
    which = "parameters but those of cut experts" if layout.ep > 1 == layout.expert_shards else "parameters"
    what = f"{which}, gradients and the optimizer's state wait in the host's memory, and the update runs there"
    because = f"offload={layout.offload}: the device has what is gathered; the host waits for each backward's gradients"
    return [Decision(what, because)]
