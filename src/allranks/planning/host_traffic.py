"""Activations that wait in the host's memory (offload=activations): what stays on the device, what the moves add."""

from collections.abc import Sequence

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.planning.block_cost import BlockCost
from allranks.planning.setting import Setting

HOST_SHARE = 0.8
"""Of a host's memory: the rest is for the processes themselves, the data and the system."""

ON_THE_WAY = 2
"""Blocks that are on the device besides: one that is being moved out, or one ahead of the backward."""


def moves(setting: Setting) -> bool:
    """Whether activations are moved."""
    return setting.offload in ("activations", "all")


def staying_bytes(profile: ModelProfile, costs: Sequence[BlockCost], held: Sequence[int], times: float) -> float:
    """Of the activations that a stage keeps for `times` micro-steps, what stays on its device.

    What no repeated block saved stays; of the repeated ones two are there (parallel/offload.py).
    """
    stays, largest = 0.0, 0.0
    for block, cost, count in zip(profile.blocks, costs, held, strict=True):
        if block.repeated:
            largest = max(largest, cost.kept_bytes if count else 0.0)
        else:
            stays += count * cost.kept_bytes
    return stays * times + ON_THE_WAY * largest


def host_seconds(
    profile: ModelProfile,
    cluster: Cluster,
    setting: Setting,
    costs: Sequence[BlockCost],
    held: Sequence[int],
    forward: float,
    backward: float,
) -> float:
    """Seconds of a step that a stage waits for the host's link: each micro-step out behind its forward, back behind its
    backward, on a stream of its own; what is longer than these is waited for.
    """
    if not moves(setting) or not cluster.host_bandwidth:
        return 0.0
    one_way = host_bytes(profile, costs, held, 1.0) / cluster.host_bandwidth
    return setting.micro_steps * (max(0.0, one_way - forward) + max(0.0, one_way - backward))


def host_bytes(profile: ModelProfile, costs: Sequence[BlockCost], held: Sequence[int], times: float) -> float:
    """What a rank with `held` blocks keeps in its host's memory for `times` micro-steps."""
    pairs = zip(profile.blocks, costs, held, strict=True)
    return times * sum(count * cost.kept_bytes for block, cost, count in pairs if block.repeated)


def host_capacity_bytes(cluster: Cluster) -> float | None:
    """What a node has for activations; None where nobody knows."""
    return None if cluster.host_memory_bytes is None else HOST_SHARE * cluster.host_memory_bytes
