"""Room: the bytes of a configuration, which say whether it fits. Of what a search looks at, most does not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from allranks.cluster import Cluster, Device
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, MemoryUse, Span
from allranks.planning.block_parts import Parts, parameters_of, parts_of
from allranks.planning.host_parameters import host_cost
from allranks.planning.host_traffic import HOST_SHARE, host_bytes, host_capacity_bytes, moves
from allranks.planning.memory import memory_use, slack_bytes
from allranks.planning.pipeline import under_way
from allranks.planning.processor_traffic import on_processor
from allranks.planning.setting import Setting, setting_of
from allranks.planning.stages import stages_under
from allranks.planning.upkeep_cost import copy_bytes
from allranks.units import format_bytes

MEMORY_LOW, MEMORY_HIGH, PEAK_HIGH = 0.94, 1.03, 1.08
"""Published peaks lie between the first times what is in use and the last times the expected peak, 5% on either side
aside. What the allocator holds beyond what is in use goes back where the device runs full: a fit is what has room for
the second times what is in use. See docs/explanation/planner.md."""
USABLE = 0.985
"""Of a GPU's memory: the driver keeps the rest (an A100 80 GB gives 79.15 GiB to torch, an H100 79.1)."""


@final
@dataclass(frozen=True, slots=True)
class Room:
    """What a configuration takes of its devices and their hosts; as in an Estimate.

    Attributes:
        memory: on the fullest rank; stages: (stage, memory) of every kind of stage.
        slack_bytes: of the peak, what the allocator holds beyond what is in use.
        copied_bytes: of `host_bytes`, the copies of checkpoints.
    """

    memory: MemoryUse
    stages: Mapping[int, MemoryUse]
    peak_bytes: Span
    capacity_bytes: float
    slack_bytes: float
    host_bytes: float
    host_capacity_bytes: float | None
    copied_bytes: float

    @property
    def fits(self) -> bool:
        """Whether device and host have room for it."""
        on_host = self.host_capacity_bytes is None or self.host_bytes <= self.host_capacity_bytes
        return on_host and self.peak_bytes.high <= self.capacity_bytes


def usable_bytes(device: Device) -> float:
    """What a process may fill of a device's memory; on a processor HOST_SHARE of the host's, an assumption."""
    return (HOST_SHARE if device.kind == "cpu" else USABLE) * device.memory_bytes


def shared_with_host(cluster: Cluster) -> str:
    """That processes on a processor are not given all of its memory, in words; "" for GPUs."""
    if cluster.device.kind != "cpu":
        return ""
    return (
        f"a process may fill {format_bytes(usable_bytes(cluster.device))}, {HOST_SHARE:.0%} of its share of the"
        " machine's memory, because the system and the data need the rest"
    )


def room_of(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Room:
    """What `choice` takes."""
    setting = on_processor(setting_of(choice), cluster, profile)
    return room_under(cluster, setting, parts_of(profile, cluster, setting), stages_under(profile, setting))


def room_under(cluster: Cluster, setting: Setting, parts: Parts, layers: tuple[tuple[int, ...], ...]) -> Room:
    """The same of a Setting whose stages hold so many of each of `parts`.

    Arithmetic: the fullest stage. The interval's two widths are from the errors of published runs
    (docs/explanation/planner.md).
    """
    # Of equal stages the first holds the most micro-steps, or the last (`under_way`).
    order = tuple(enumerate(layers))
    most = {held: stage for stage, held in (order if setting.schedule == "interleaved_zb" else reversed(order))}
    ends = sorted({0, len(layers) // 2, len(layers) - 1, *most.values()})
    stages = {stage: memory_use(parts.profile, setting, parts.costs, layers[stage], stage) for stage in ends}
    memory = max(stages.values(), key=lambda use: use.total)
    capacity = usable_bytes(cluster.device)
    slack = slack_bytes(setting, memory, capacity)
    peak = memory.total + slack
    copied = copy_bytes(parts.profile, cluster, setting)
    high = max(peak, MEMORY_HIGH * memory.total, min(PEAK_HIGH * peak, capacity))
    return Room(
        memory=memory,
        stages=stages,
        peak_bytes=Span(MEMORY_LOW * memory.total, peak, high),
        capacity_bytes=capacity,
        slack_bytes=slack,
        host_bytes=_moved_bytes(cluster, setting, parts, layers) + copied,
        host_capacity_bytes=host_capacity_bytes(cluster),
        copied_bytes=copied,
    )


def _moved_bytes(cluster: Cluster, setting: Setting, parts: Parts, layers: tuple[tuple[int, ...], ...]) -> float:
    """What offload keeps in the host.

    Of a node whose devices all are of the first stage, which has the most micro-steps under way, or of the last.
    Arithmetic: a device's part (planning/host_traffic.py) times the devices of a node.
    """
    if setting.offload == "none":
        return 0.0
    kept = max(host_cost(cluster, setting, parameters_of(parts, held)).kept_bytes for held in (layers[0], layers[-1]))
    if moves(setting):
        times = under_way(setting.schedule, 0, setting.pp, setting.chunks, setting.micro_steps)
        kept += host_bytes(parts.profile, parts.costs, layers[0], times * setting.mechanisms.offloaded_share)
    return cluster.devices_per_node * kept
