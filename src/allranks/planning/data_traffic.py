"""What data parallelism and the optimizer add to a step: gathers, reductions, the update; and what overlap hides."""

from dataclasses import dataclass, replace
from typing import NamedTuple, final

from allranks.planning.axis_traffic import Axes
from allranks.planning.block_cost import NOTHING_AROUND, Around, Parameters
from allranks.planning.collectives import all_gather_seconds, all_reduce_seconds, reduce_scatter_seconds
from allranks.planning.compute import update_seconds
from allranks.planning.setting import Setting


@final
@dataclass(frozen=True, slots=True)
class Sums:
    """What some of the data-parallel ranks move by themselves, of one step: their part of a DataCost's seconds.

    Attributes:
        hidden: of `seconds`, in what is apart from the others' (`twins`).
    """

    seconds: float
    sent_bytes: float
    count: int
    hidden: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class DataCost:
    """Seconds of one step: all of the communication, what is exposed of it, and the update.

    Attributes:
        sent_bytes, count: without those of `copies` and of `twins`.
        copies: over copies of what each shares out (HSDP); None: nothing is summed over copies apart.
        twins: of experts that ep cuts, over those who hold the same ones.
    """

    seconds: float
    exposed: float
    update: float
    sent_bytes: float
    count: int
    copies: Sums | None = None
    twins: Sums | None = None


@final
class Moved(NamedTuple):
    """Parameters that data-parallel ranks gather, and those whose gradients they reduce, of one rank."""

    gathered: float
    reduced: float


LOW_RANK = 0.01
"""Of a model's parameters those that low-rank matrices add, whose gradients are all that travel (LoRA 2106.09685)."""


def moved_parameters(setting: Setting, every: Parameters) -> Moved:
    """Of a rank that holds `every` parameter of these. Arithmetic of who holds copies (GShard, 2006.16668).

    Of experts that ep cuts our engine moves none with the others: `twin_sums` has what it moves of them. Elsewhere they
    are copied on ranks / ep of the data-parallel ranks alone.
    """
    if setting.experts_whole or setting.experts_apart:
        return Moved(every.dense, every.trained)
    among = 1.0 if setting.ep == 1 else max(0.0, 1 - setting.ep / (setting.dp * setting.cp))
    gathered = every.dense + every.expert * among
    return Moved(gathered, LOW_RANK * gathered if setting.frozen else every.trained + every.trained_expert * among)


def held_trained(setting: Setting, every: Parameters) -> float:
    """How many of `every` a rank updates: from ZeRO's stage 1 on its share alone (1910.02054, section 5.1)."""
    if setting.zero < 1:
        return every.trained + every.trained_expert
    return every.trained / max(1, setting.shard) + every.trained_expert / setting.expert_shards


def gathered_again(setting: Setting, moved: Moved, units: int, around: Around) -> tuple[float, int]:
    """(Parameters, in how many blocks) that ZeRO 3 gathers once more for the backward of a micro-step.

    All of them (1910.02054, section 7.2.2); FSDP2 keeps what stands around the blocks, which is its root's
    (torch/distributed/fsdp/_fully_shard/_fsdp_state.py, `_lazy_init`).
    """
    if setting.keeps_gathered:
        return 0.0, 0
    if not setting.mechanisms.keeps_around:
        return moved.gathered, units
    return moved.gathered - moved_parameters(setting, around.parameters).gathered, units - around.units


def data_cost(
    setting: Setting,
    axes: Axes,
    every: Parameters,
    units: int,
    forward: float,
    backward: float,
    around: Around = NOTHING_AROUND,
) -> DataCost:
    """Of a rank that holds `every` of these in `units` blocks and takes `forward` and `backward` for one micro-step.

    Unsharded: one all-reduce of the gradients (2006.15704), behind the last backward where it overlaps. ZeRO 1 and 2: a
    reduce-scatter and a gather of the weights (1910.02054, section 7), or that all-reduce and a gather. ZeRO 3 gathers
    each unit for forward and backward of every micro-step (2304.11277, section 3.3), but for those `around` the
    repeated ones where they stay between, and hides what the unit before computes.
    """
    update = update_seconds(axes.machine, held_trained(setting, every)) if not setting.frozen else 0.0
    if setting.dp * setting.cp == 1:
        return DataCost(0.0, 0.0, update, 0.0, 0)
    moved = moved_parameters(setting, every)
    if setting.zero >= 3:
        again = gathered_again(setting, moved, units, around)
        found = _sharded_cost(setting, axes, moved, units, again, forward, backward, update)
    else:
        found = _whole_cost(setting, axes, moved, units, forward, backward, update)
    room = setting.micro_steps * backward - (found.seconds - found.exposed)
    return with_twins(found, twin_sums(setting, axes, every, units - around.units, room))


def _whole_cost(
    setting: Setting, axes: Axes, moved: Moved, units: int, forward: float, backward: float, update: float
) -> DataCost:
    """Of ranks that keep whole parameters, and share the optimizer's state or not.

    DDP reduces all gradients behind the backward (2006.15704, section 3.2.3); ZeRO 1 scatters their sums and gathers
    what was updated, as many bytes (1910.02054, section 7.2.1).
    """
    how, bytes_reduced = setting.mechanisms, moved.reduced * setting.mechanisms.reduce_bytes
    if setting.zero >= 1 and how.reduces_to_all:
        summed, gathered = all_reduce_seconds(axes.data, bytes_reduced), moved.reduced * how.weight_bytes
        seconds = summed + all_gather_seconds(axes.shard, gathered)
        hidden = min(how.overlap_data * summed, backward)
        return DataCost(seconds, seconds - hidden, update, 2 * bytes_reduced + gathered, 2 * units)
    if setting.zero >= 1:
        scatter = all_gather_seconds(axes.data, bytes_reduced)
        gather = all_gather_seconds(axes.data, moved.reduced * how.gather_bytes)
        hidden = min(how.overlap_data * scatter, backward) + min(how.overlap_data * gather, forward)
        seconds = scatter + gather
        sent = bytes_reduced + moved.reduced * how.gather_bytes
        return DataCost(seconds, seconds - hidden, update, sent, 2 * units)
    seconds = all_reduce_seconds(axes.data, bytes_reduced)
    hidden = min(how.overlap_data * seconds, backward)
    return DataCost(seconds, seconds - hidden, update, 2 * bytes_reduced, units)


def _sharded_cost(
    setting: Setting,
    axes: Axes,
    moved: Moved,
    units: int,
    again: tuple[float, int],
    forward: float,
    backward: float,
    update: float,
) -> DataCost:
    """Of ZeRO 3: gathers, reductions (1910.02054, section 7) and what hides them (2304.11277, section 3.3)."""
    how, steps = setting.mechanisms, setting.micro_steps
    messages = max(1, units) * how.messages
    gather = all_gather_seconds(axes.shard, moved.gathered / messages * how.gather_bytes) * messages
    messages_again = again[1] * how.messages
    size_again = again[0] / messages_again * how.gather_bytes if messages_again else 0.0
    gather_again = all_gather_seconds(axes.shard, size_again) * messages_again if messages_again else 0.0
    reduce = all_gather_seconds(axes.shard, moved.reduced / messages * how.reduce_bytes) * messages
    reductions = steps if how.reduces_every_micro_step else 1
    copies = sum_over_copies(setting, axes, moved.reduced, round(messages), reductions)
    # With the last of the reductions, or with each of them.
    summed, times = (0.0, reductions) if copies is None else (copies.seconds, copies.count // round(messages))
    forwards = reductions if setting.keeps_gathered else steps
    # A unit's gather hides behind the unit before, its reduction behind the unit after; the first and the last cannot.
    in_forward = _exposed(gather, forward, how.overlap_data) + gather / messages

    def in_backward(reduces: float) -> float:
        """Arithmetic: of all but the last of these reductions, which nothing follows."""
        return _exposed(gather_again + reduces, backward, how.overlap_data) + reduces / messages

    only = _exposed(gather_again, backward, how.overlap_data)
    with_copies = times * in_backward(reduce + summed / times) + (reductions - times) * in_backward(reduce)
    exposed = forwards * in_forward + with_copies + (steps - reductions) * only
    total = forwards * gather + steps * gather_again + reductions * reduce + summed
    exposed = min(exposed, total)
    exposed += how.contention * (total - exposed)
    sent = (forwards * moved.gathered + steps * again[0]) * how.gather_bytes
    sent += moved.reduced * reductions * how.reduce_bytes
    count = round(messages) * (forwards + reductions) + round(messages_again) * steps
    return DataCost(total, exposed, update, sent, count, copies)


def sum_over_copies(setting: Setting, axes: Axes, parameters: float, messages: int, reductions: int) -> Sums | None:
    """Of a rank's shards (2304.11277, section 3.2.2); None where there are no copies.

    Once a step, behind the last micro-step's reductions (FSDP2's set_requires_all_reduce, parallel/spread.py); a
    pipeline's schedule mixes micro-steps, and sums each of them.
    """
    if setting.dp * setting.cp // max(1, setting.shard) <= 1:
        return None
    times = reductions if setting.pp > 1 else 1
    size = parameters / max(1, setting.shard) * setting.mechanisms.reduce_bytes
    return Sums(times * all_reduce_seconds(axes.copies, size), times * 2 * size, times * messages)


def twin_sums(setting: Setting, axes: Axes, every: Parameters, units: int, room: float = 0.0) -> Sums | None:
    """Of experts that ep cuts; None where nobody holds the same ones, or a framework shares them as other parameters.

    Of whole ones the gradients, once a step, after the last backward (parallel/expert.py). Of sharded ones as ZeRO 3
    has it, in `units` blocks (parallel/shard.py): nothing runs ahead of a forward's gathers, which are waited for.

    Args:
        room: seconds of the backwards behind which nothing travels yet.
    """
    if axes.twins.size <= 1 or not every.expert:
        return None
    if setting.experts_apart:
        return _shared_by_twins(setting, axes, every, max(1, units), room)
    if not setting.experts_whole or not every.trained_expert:
        return None
    size = every.trained_expert * setting.mechanisms.gradient_bytes
    return Sums(all_reduce_seconds(axes.twins, size), 2 * size, 1)


def _shared_by_twins(setting: Setting, axes: Axes, every: Parameters, units: int, room: float) -> Sums:
    """Gathers for forward and backward of each micro-step, reductions, and what copies sum of these.

    As FSDP's of any other parameter (2304.11277, section 3.2, hybrid sharding for the copies), over those ranks that
    have the same experts.
    """
    how, steps = setting.mechanisms, setting.micro_steps
    reductions = steps if how.reduces_every_micro_step else 1
    again = 0 if setting.keeps_gathered else steps
    forwards = reductions if setting.keeps_gathered else steps
    gathered, reduced = every.expert * how.gather_bytes, every.trained_expert * how.reduce_bytes
    gather = units * all_gather_seconds(axes.twins, gathered / units)
    reduce = units * reduce_scatter_seconds(axes.twins, reduced / units)
    behind = again * gather + reductions * reduce
    seconds, sent = forwards * gather + behind, (forwards + again) * gathered + reductions * reduced
    count = units * (forwards + again + reductions)
    if axes.twin_copies.size > 1:
        times, part = reductions if setting.pp > 1 else 1, reduced / axes.twins.size
        seconds += times * all_reduce_seconds(axes.twin_copies, part)
        sent, count = sent + times * 2 * part, count + times * units
    return Sums(seconds, sent, count, min(how.overlap_data * behind, max(0.0, room)))


def with_twins(cost: DataCost, twins: Sums | None) -> DataCost:
    """With these, of which nothing else is hidden than they say: arithmetic, a sum."""
    if twins is None:
        return cost
    exposed = cost.exposed + twins.seconds - twins.hidden
    return replace(cost, seconds=cost.seconds + twins.seconds, exposed=exposed, twins=twins)


def _exposed(communication: float, computation: float, overlap: float) -> float:
    """What is left of a communication that runs behind a computation as far as the framework lets it.

    Arithmetic: the longer of the two minus the computation. Its share is `Mechanisms.overlap_data`, with its source.
    """
    return max(0.0, overlap * communication - computation) + (1 - overlap) * communication
