"""What waits in the host's memory (`offload`): the activations that stay on the device, and what the moves add."""

from collections.abc import Sequence

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.planning.block_cost import BlockCost
from allranks.planning.host_parameters import HostCost
from allranks.planning.setting import Setting
from allranks.units import format_bytes

HOST_SHARE = 0.8
"""Of a host's memory: the rest is for the processes themselves, the data and the system."""

ON_THE_WAY = 2
"""Blocks that are on the device besides: one that is being moved out, or one ahead of the backward."""


def moves(setting: Setting) -> bool:
    """Whether activations are moved."""
    return setting.offload in ("activations", "all")


def staying_bytes(
    profile: ModelProfile, costs: Sequence[BlockCost], held: Sequence[int], times: float, share: float = 1.0
) -> float:
    """Of the activations that a stage keeps for `times` micro-steps, what stays on its device.

    What no repeated block saved stays; of the repeated ones two are there (parallel/offload.py), and of each what is
    beyond the `share` that is moved.
    """
    stays, largest = 0.0, 0.0
    for block, cost, count in zip(profile.blocks, costs, held, strict=True):
        if block.repeated:
            largest = max(largest, share * cost.kept_bytes if count else 0.0)
        stays += count * cost.kept_bytes * (1 - share if block.repeated else 1.0)
    return stays * times + ON_THE_WAY * largest


def host_seconds(
    profile: ModelProfile,
    cluster: Cluster,
    setting: Setting,
    costs: Sequence[BlockCost],
    held: Sequence[int],
    forward: float,
    backward: float,
    waits: HostCost,
) -> float:
    """Seconds of a step that a stage waits for the host's link and for what the host adds up.

    Activations go out behind their forward and come back behind their backward, parameters come in for both, gradients
    go out behind the backward, on streams of their own and in both directions at once; what takes longer than these is
    waited for. A gradient that is added to another one is waited for in any case (FSDP2, foreach_reduce).
    """
    if setting.offload == "none" or not cluster.host_bandwidth:
        return 0.0
    moved = host_bytes(profile, costs, held, setting.mechanisms.offloaded_share) if moves(setting) else 0.0
    again = waits.weight_bytes if waits.gathers_in_backward else 0.0
    in_forward = max(waits.weight_bytes, moved) / cluster.host_bandwidth
    in_backward = max(again + moved, waits.gradient_bytes) / cluster.host_bandwidth
    waited = setting.micro_steps * (max(0.0, in_forward - forward) + max(0.0, in_backward - backward))
    added = (setting.micro_steps - 1) * waits.gradient_bytes / cluster.host_bandwidth if waits.adding_seconds else 0.0
    return waited + added + waits.adding_seconds


def host_bytes(profile: ModelProfile, costs: Sequence[BlockCost], held: Sequence[int], times: float) -> float:
    """What a rank with `held` blocks keeps in its host's memory for `times` micro-steps (parallel/offload.py)."""
    pairs = zip(profile.blocks, costs, held, strict=True)
    return times * sum(count * cost.kept_bytes for block, cost, count in pairs if block.repeated)


def host_capacity_bytes(cluster: Cluster) -> float | None:
    """What a node has for what is moved there; None where nobody knows. The share is an assumption: HOST_SHARE."""
    return None if cluster.memory_of_host is None else HOST_SHARE * cluster.memory_of_host


def vendors_host(cluster: Cluster) -> str:
    """That a host's memory is that of the vendor's node, with the way to give another; "" where it is not."""
    if cluster.memory_of_host is None or not cluster.takes_vendors_host:
        return ""
    return (
        f"each host is taken to have {format_bytes(cluster.memory_of_host)}, because the catalog's node of"
        f" {cluster.device.name} has as much for as many devices; another figure: host_memory_gb in a cluster file"
    )
