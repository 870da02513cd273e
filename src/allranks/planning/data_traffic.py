"""What data parallelism and the optimizer add to a step: gathers, reductions, the update; and what overlap hides."""

from dataclasses import dataclass
from typing import final

from allranks.planning.axis_traffic import Axes
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds
from allranks.planning.compute import update_seconds
from allranks.planning.setting import Setting


@final
@dataclass(frozen=True, slots=True)
class OverCopies:
    """The sums over copies of what each shares out (HSDP), of one step: their part of a DataCost's seconds."""

    seconds: float
    sent_bytes: float
    count: int


@final
@dataclass(frozen=True, slots=True)
class DataCost:
    """Seconds of one step: all of the communication, what is exposed of it, and the update.

    Attributes:
        sent_bytes, count: without those of `copies`; None: nothing is summed over copies apart.
    """

    seconds: float
    exposed: float
    update: float
    sent_bytes: float
    count: int
    copies: OverCopies | None = None


def data_cost(
    setting: Setting,
    axes: Axes,
    parameters: float,
    expert_parameters: float,
    units: int,
    forward: float,
    backward: float,
) -> DataCost:
    """Of a rank that holds `parameters` in `units` blocks and takes `forward` and `backward` for one micro-step.

    Unsharded: one all-reduce of the gradients (2006.15704), behind the last backward where it overlaps. ZeRO 1 and 2: a
    reduce-scatter and a gather of the weights (1910.02054, section 7), or that all-reduce and a gather. ZeRO 3 gathers
    each unit for forward and backward of every micro-step (2304.11277, section 3.3), and hides what the unit before
    computes.
    """
    how, ranks = setting.mechanisms, setting.dp * setting.cp
    whole = parameters + expert_parameters
    shard = max(1, setting.shard)
    sharded = parameters / shard + expert_parameters / setting.expert_shards
    held = sharded if setting.zero >= 1 else whole
    update = update_seconds(axes.machine, held) if not setting.frozen else 0.0
    if ranks == 1:
        return DataCost(0.0, 0.0, update, 0.0, 0)
    # Experts are copied on ranks / ep of the data-parallel ranks alone.
    reduced = parameters + expert_parameters * (1.0 if setting.ep == 1 else max(0.0, 1 - setting.ep / ranks))
    if setting.frozen:
        reduced *= 0.01
    if setting.zero >= 3:
        return _sharded_cost(setting, axes, reduced, units, forward, backward, update)
    bytes_reduced = reduced * how.reduce_bytes
    if setting.zero >= 1 and how.reduces_to_all:
        summed, gathered = all_reduce_seconds(axes.data, bytes_reduced), reduced * how.weight_bytes
        seconds = summed + all_gather_seconds(axes.shard, gathered)
        hidden = min(how.overlap_data * summed, backward)
        return DataCost(seconds, seconds - hidden, update, 2 * bytes_reduced + gathered, 2 * units)
    if setting.zero >= 1:
        scatter = all_gather_seconds(axes.data, bytes_reduced)
        gather = all_gather_seconds(axes.data, reduced * how.gather_bytes)
        hidden = min(how.overlap_data * scatter, backward) + min(how.overlap_data * gather, forward)
        seconds = scatter + gather
        sent = bytes_reduced + reduced * how.gather_bytes
        return DataCost(seconds, seconds - hidden, update, sent, 2 * units)
    seconds = all_reduce_seconds(axes.data, bytes_reduced)
    hidden = min(how.overlap_data * seconds, backward)
    return DataCost(seconds, seconds - hidden, update, 2 * bytes_reduced, units)


def _sharded_cost(
    setting: Setting, axes: Axes, parameters: float, units: int, forward: float, backward: float, update: float
) -> DataCost:
    """Of ZeRO 3: gathers, reductions (1910.02054, section 7) and what hides them (2304.11277, section 3.3)."""
    how, steps = setting.mechanisms, setting.micro_steps
    messages = max(1, units) * how.messages
    gather = all_gather_seconds(axes.shard, parameters / messages * how.gather_bytes) * messages
    reduce = all_gather_seconds(axes.shard, parameters / messages * how.reduce_bytes) * messages
    reductions = steps if how.reduces_every_micro_step else 1
    copies = sum_over_copies(setting, axes, parameters, round(messages), reductions)
    if copies is not None:
        reduce += copies.seconds / reductions
    forwards = reductions if setting.keeps_gathered else steps
    again = 0 if setting.keeps_gathered else steps
    # A unit's gather hides behind the unit before, its reduction behind the unit after; the first and the last cannot.
    in_forward = _exposed(gather, forward, how.overlap_data) + gather / messages
    in_backward = _exposed(gather + reduce, backward, how.overlap_data) + reduce / messages
    only = _exposed(gather, backward, how.overlap_data)
    if setting.keeps_gathered:
        in_backward, only = _exposed(reduce, backward, how.overlap_data) + reduce / messages, 0.0
    exposed = forwards * in_forward + reductions * in_backward + (steps - reductions) * only
    total = (forwards + again) * gather + reductions * reduce
    exposed = min(exposed, total)
    exposed += how.contention * (total - exposed)
    sent = parameters * ((forwards + again) * how.gather_bytes + reductions * how.reduce_bytes)
    return DataCost(total, exposed, update, sent, round(messages) * (forwards + again + reductions), copies)


def sum_over_copies(
    setting: Setting, axes: Axes, parameters: float, messages: int, reductions: int
) -> OverCopies | None:
    """Of a rank's shards, once a reduction (2304.11277, section 3.2.2); None where there are no copies."""
    if setting.dp * setting.cp // max(1, setting.shard) <= 1:
        return None
    size = parameters / max(1, setting.shard) * setting.mechanisms.reduce_bytes
    return OverCopies(reductions * all_reduce_seconds(axes.data, size), reductions * 2 * size, reductions * messages)


def _exposed(communication: float, computation: float, overlap: float) -> float:
    """What is left of a communication that runs behind a computation as far as the framework lets it."""
    return max(0.0, overlap * communication - computation) + (1 - overlap) * communication
