"""What data parallelism and the update add to a step on a measured processor: gloo as measured, nothing hidden.

gloo's threads need the cores that compute, so that what is sent behind a computation takes its time from it.
"""

from dataclasses import replace

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.planning.axis_traffic import Axes
from allranks.planning.block_cost import NOTHING_AROUND, Around, Parameters
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from allranks.planning.data_traffic import (
    DataCost,
    Moved,
    gathered_again,
    held_trained,
    moved_parameters,
    sum_over_copies,
    twin_sums,
    with_twins,
)
from allranks.planning.processor import floor, is_processor, passing_seconds
from allranks.planning.setting import Setting

NORM_PASSES, CLIP_PASSES = 1.0, 2.0
"""Reads and writes of a gradient for the norm, and to scale it."""
WIDTH = 4.0


def on_processor(setting: Setting, cluster: Cluster, profile: ModelProfile) -> Setting:
    """The Setting as a processor runs it: nothing is hidden, and the host is the device, so that it does not wait.

    Activations are cut along the sequence where the engine's plan for the model does that.
    """
    if cluster.device.context_bytes is not None:
        own = replace(setting.mechanisms, context_bytes=cluster.device.context_bytes)
        setting = replace(setting, mechanisms=own)
    if not is_processor(cluster.device):
        return _as_dispatched(setting, cluster)
    how = replace(
        setting.mechanisms, overlap_data=0.0, overlap_tensor=0.0, overlap_pipeline=0.0, dispatch_seconds=0.0,
        sequence_parallel=any(o.cut == "sequence" for block in profile.blocks for o in block.operations),
        fixed=cluster.device.fixed, cores=cluster.device.cores or 1.0,
    )  # fmt: skip
    return replace(setting, mechanisms=how)


def _as_dispatched(setting: Setting, cluster: Cluster) -> Setting:
    """On an accelerator whose kernels in a row were measured: its host starts them no faster than that."""
    device, how = cluster.device, setting.mechanisms
    if not device.measured or (device.kernel_seconds or 0.0) <= how.dispatch_seconds:
        return setting
    assert device.kernel_seconds is not None
    return replace(setting, mechanisms=replace(how, dispatch_seconds=device.kernel_seconds))


def processor_data_cost(
    setting: Setting,
    axes: Axes,
    every: Parameters,
    units: int,
    around: Around = NOTHING_AROUND,
) -> DataCost:
    """As `data_traffic.data_cost`, every second exposed.

    FSDP2 copies besides what it sends (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py): a gather's shard into
    the buffer and the whole out of it into the parameters, a reduction's gradients into its buffer.
    """
    held, frozen = held_trained(setting, every), setting.frozen
    update = setting.mechanisms.fixed.step if frozen else _update_seconds(setting, axes, held)
    if setting.dp * setting.cp == 1 or not every.dense + every.expert:
        return DataCost(0.0, 0.0, update, 0.0, 0)
    moved = moved_parameters(setting, every)
    again = gathered_again(setting, moved, units, around) if setting.zero >= 3 else (0.0, 0)
    found = _moving_cost(setting, axes, moved, units, again, update)
    twins = twin_sums(setting, axes, every, units - around.units)
    if twins is not None:
        copied = 2 if setting.experts_apart else 1  # into the messages and out of them
        passing = passing_seconds(axes.machine.device, copied * twins.sent_bytes, 1)
        passing += twins.count * setting.mechanisms.fixed.unit_message * setting.experts_apart
        twins = replace(twins, seconds=twins.seconds + passing)
    return with_twins(found, twins)


def _moving_cost(
    setting: Setting, axes: Axes, moved: Moved, units: int, again: tuple[float, int], update: float
) -> DataCost:
    """But for experts that ep cuts: the collectives of DDP (2006.15704), ZeRO (1910.02054, section 7) or FSDP2, whose
    units are `Mechanisms.messages`, each with the copies around it, and gloo as it was measured.
    """
    how, device = setting.mechanisms, axes.machine.device
    size = moved.reduced * how.reduce_bytes
    if setting.zero == 0:
        seconds = all_reduce_seconds(axes.data, size) + passing_seconds(device, 2 * size, units)
        return DataCost(seconds, seconds, update, 2 * size, units)
    messages = max(1, units) * how.messages
    gathered = moved.gathered * how.gather_bytes if setting.zero >= 3 else moved.reduced * how.weight_bytes
    gather = _gather_seconds(setting, axes, gathered, messages)
    if setting.zero < 3 and how.reduces_to_all:
        seconds = gather + all_reduce_seconds(axes.data, size) + passing_seconds(device, 2 * size, units)
        return DataCost(seconds, seconds, update, 2 * size + gathered, units + round(messages))
    reduce = messages * (reduce_scatter_seconds(axes.shard, size / messages) + how.fixed.unit_message)
    reduce += messages * passing_seconds(device, 2 * size / messages, 1)
    reductions = setting.micro_steps if setting.zero >= 3 and how.reduces_every_micro_step else 1
    copies = sum_over_copies(setting, axes, moved.reduced, round(messages), reductions)
    forwards = 1 if setting.zero < 3 else setting.micro_steps
    size_again, messages_again = again[0] * how.gather_bytes, again[1] * how.messages
    gather_again = _gather_seconds(setting, axes, size_again, messages_again)
    seconds = forwards * (gather + gather_again) + reductions * reduce + (0.0 if copies is None else copies.seconds)
    sent = forwards * (gathered + size_again) + reductions * size
    count = round(messages) * (forwards + reductions) + round(messages_again) * forwards
    return DataCost(seconds, seconds, update, sent, count, copies)


def _gather_seconds(setting: Setting, axes: Axes, size: float, messages: float) -> float:
    """Of so many bytes in so many messages, with the copies that FSDP2 makes of each into its buffer and out of it
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    """
    if not messages:
        return 0.0
    each = size / messages
    copied = passing_seconds(axes.machine.device, 2 * each * (1 + 1 / max(1, setting.shard)), 2)
    return messages * (all_gather_seconds(axes.shard, each) + setting.mechanisms.fixed.unit_message + copied)


def _update_seconds(setting: Setting, axes: Axes, held: float) -> float:
    """The norm, clipping, and AdamW at its measured rate."""
    device = axes.machine.device
    moved = (NORM_PASSES + CLIP_PASSES) * WIDTH * held
    step = held / device.update_rate if device.update_rate else 7 * WIDTH * held / device.memory_bandwidth
    return moved / device.memory_bandwidth + step + 10 * floor(device) + setting.mechanisms.fixed.step
