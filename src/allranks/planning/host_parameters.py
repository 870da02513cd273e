"""Parameters, gradients and the optimizer's state in the host's memory (offload=parameters): bytes, moves, the update.

Each rank's shard comes to its device before every gather and its reduced gradient goes back (FSDP2's CPUOffloadPolicy:
_fsdp_param.py, all_gather_inputs; _fsdp_collectives.py, foreach_reduce), in the type that the shard is kept in, and the
host's processors update it (ZeRO-Offload 2101.06840).
"""

from dataclasses import dataclass
from typing import final

from allranks.cluster import Cluster
from allranks.planning.block_cost import Parameters
from allranks.planning.setting import Setting

HOST_BANDWIDTH = 1.1e11
"""Bytes/s that a node's processors read and write in a fused Adam: 10 billion parameters in 2.57 s, 28 bytes each
(ZeRO-Offload 2101.06840, table 4, two Xeon 8168). All ranks of the node share it; newer hosts have more."""
UPDATE_BYTES, ADD_BYTES = 28.0, 12.0
"""Per parameter: gradient, weight and two moments are read, three of them written; a gradient is added to the sum."""


@final
@dataclass(frozen=True, slots=True)
class HostCost:
    """Of one rank: bytes that its host keeps, bytes of one pass of its shard in a gather's or a gradient's direction,
    how often they come and go in a micro-step; seconds of a step that its host adds gradients, and updates."""

    kept_bytes: float = 0.0
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    gathers_in_backward: bool = False
    adding_seconds: float = 0.0
    update_seconds: float = 0.0


def waits_on_host(setting: Setting) -> bool:
    """Whether parameters do."""
    return setting.offload in ("parameters", "all")


def host_cost(cluster: Cluster, setting: Setting, every: Parameters) -> HostCost:
    """Of a rank whose stage has `every` parameter; experts that are whole stay on the device (docs: save memory).

    What goes and comes is FSDP2's CPUOffloadPolicy (torch/distributed/fsdp/_fully_shard); the update that of
    ZeRO-Offload (2101.06840, table 4).
    """
    if not waits_on_host(setting):
        return HostCost()
    how = setting.mechanisms
    shard, experts = max(1, setting.shard), 0.0 if setting.experts_whole else 1 / setting.expert_shards
    held = every.dense / shard + every.expert * experts
    trained = every.trained / shard + every.trained_expert * experts
    on_node = trained * min(cluster.devices_per_node, setting.world_size)
    additions = setting.micro_steps - 1 if how.reduces_every_micro_step else 0
    return HostCost(
        kept_bytes=held * how.weight_bytes + trained * (how.gradient_bytes + how.optimizer_bytes),
        weight_bytes=held * how.weight_bytes,
        gradient_bytes=trained * how.gradient_bytes,
        gathers_in_backward=not setting.keeps_gathered,
        adding_seconds=additions * on_node * ADD_BYTES / HOST_BANDWIDTH,
        update_seconds=on_node * UPDATE_BYTES / HOST_BANDWIDTH,
    )
