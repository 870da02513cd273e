"""estimate: what a Choice costs on a Cluster. Pure: the same arguments give the same Estimate."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Estimate, Span, StepTime, Traffic
from allranks.planning.axis_traffic import Axes
from allranks.planning.block_cost import NOTHING_AROUND, BlockCost, Parameters
from allranks.planning.block_parts import Parts, around_of, parameters_of, parts_of
from allranks.planning.compute import update_seconds
from allranks.planning.corrections import factor_of
from allranks.planning.data_traffic import DataCost, data_cost, held_trained
from allranks.planning.host_parameters import host_cost, waits_on_host
from allranks.planning.host_traffic import host_seconds
from allranks.planning.pipeline import parted_share, pipeline_seconds, shared_bubble
from allranks.planning.pipeline_traffic import hop_seconds, pipeline_traffic
from allranks.planning.processor import is_processor
from allranks.planning.processor_traffic import on_processor, processor_data_cost
from allranks.planning.room import Room, room_under
from allranks.planning.setting import Setting, setting_of
from allranks.planning.stages import stages_under
from allranks.planning.uncertainty import spread_of
from allranks.planning.upkeep_cost import with_upkeep
from allranks.rehearsed_messages import COPIES_OF_EXPERTS

MEETING = 6.0
"""Host and device wait for each other where neither is clearly the faster: the step is the norm of this order of both,
12% above them where they are equal."""
SOCKET = 4
"""Devices of a processor's socket in servers of eight with two of them (DGX A100 and H100)."""


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What a Setting costs: an Estimate without its Choice."""

    room: Room
    time: StepTime
    step_seconds: Span
    traffic: tuple[Traffic, ...]
    mfu: float


def estimate(profile: ModelProfile, cluster: Cluster, choice: Choice, room: Room | None = None) -> Estimate:
    """Memory, time and traffic of one optimizer step under `choice`, whose `room` may be known already."""
    factor = factor_of(cluster, choice.layout)
    cost = estimate_setting(profile, cluster, setting_of(choice), factor, room)
    room, seconds = cost.room, cost.step_seconds.expected
    samples = choice.global_batch / seconds if seconds else 0.0
    return Estimate(
        choice=choice,
        memory=room.memory,
        stages=room.stages,
        peak_bytes=room.peak_bytes,
        capacity_bytes=room.capacity_bytes,
        time=cost.time,
        step_seconds=cost.step_seconds,
        traffic=cost.traffic,
        mfu=cost.mfu,
        samples_per_second=samples,
        tokens_per_second=samples * profile.tokens,
        host_bytes=room.host_bytes,
        host_capacity_bytes=room.host_capacity_bytes,
        copied_bytes=room.copied_bytes,
        correction=factor,
    )


def _slowed(time: StepTime, factor: float) -> StepTime:
    if factor == 1.0:
        return time
    return StepTime(**{part.name: factor * getattr(time, part.name) for part in fields(StepTime)})


@final
@dataclass(frozen=True, slots=True)
class _Stage:
    forward: float
    backward: float
    weight: float
    again: float
    tensor: float
    context: float
    expert: float
    host: float


def _stage(held: tuple[int, ...], costs: tuple[BlockCost, ...], setting: Setting) -> _Stage:
    """Seconds of one micro-step on one stage; where the host is slower than the device, the difference is host.

    Arithmetic: sums over its blocks. A host that dispatches a kernel after the other, and a device that computes them,
    take a norm of both where neither is much slower, the order of which, MEETING, is an assumption. Forward, both
    gradients and what is recomputed are so many launches (`Mechanisms.dispatch_seconds`, planning/mechanisms.py).
    """
    how = setting.mechanisms
    parted = how.fixed.parting * parted_share(setting.schedule, setting.pp, setting.micro_steps)
    sums = [0.0] * 7 + [how.fixed.micro_step]
    for count, cost in zip(held, costs, strict=True):
        if count:
            exposed = (1 - how.overlap_tensor) * cost.tensor
            kernels = 3 * cost.kernels + cost.kernels_again
            collective = how.collective_kernels * how.dispatch_seconds + how.wait_seconds * max(0, setting.tp - SOCKET)
            dispatched = kernels * how.dispatch_seconds + cost.collectives * 3 * collective
            device = cost.forward + cost.backward + cost.weight + cost.again + exposed
            fixed = kernels * how.fixed.operation + cost.kernels * parted
            parts = (
                *(cost.forward, cost.backward, cost.weight, cost.again, exposed, cost.context, cost.expert),
                (device**MEETING + dispatched**MEETING) ** (1 / MEETING) - device + fixed,
            )
            sums = [total + count * part for total, part in zip(sums, parts, strict=True)]
    return _Stage(*sums)


def estimate_setting(
    profile: ModelProfile, cluster: Cluster, setting: Setting, factor: float = 1.0, room: Room | None = None
) -> Cost:
    """The same for a Setting, which may be another framework's, with its work taking `factor` times as long.

    A backward has the moves of a forward and those of its gradients: a third of what tp sends is in the forward, under
    cp and ep one half (arithmetic of the moves that planning/axis_traffic.py counts); the slowest stage sets the pace
    (2104.04473, section 2.2).
    """
    setting = on_processor(setting, cluster, profile)
    parts = parts_of(profile, cluster, setting)
    layers = stages_under(profile, setting)
    stages = [_stage(held, parts.costs, setting) for held in layers]
    forward = [s.forward + s.tensor / 3 + (s.context + s.expert) / 2 + s.host / 3 for s in stages]
    backward = [s.backward + s.again + s.tensor * 2 / 3 + (s.context + s.expert) / 2 + s.host * 2 / 3 for s in stages]
    weight = [s.weight for s in stages]
    send = hop_seconds(profile, setting, parts.axes)
    if setting.pp > 1:
        forward = [f + send for f in forward]
        backward = [b + send for b in backward]
    steady, bubble = pipeline_seconds(setting.schedule, forward, backward, weight, setting.chunks, setting.micro_steps)
    if setting.mechanisms.cores < 1:
        busy = setting.micro_steps * (sum(forward) + sum(backward) + sum(weight)) / setting.pp
        bubble = shared_bubble(steady, bubble, busy, setting.mechanisms.cores)
    worst = max(range(len(stages)), key=lambda i: forward[i] + backward[i] + weight[i])
    data = _data(parts, setting, layers, forward, backward, weight)
    held = layers[worst]
    stays = host_cost(cluster, setting, parameters_of(parts, held))
    waits = host_seconds(
        profile, cluster, setting, parts.costs, held, forward[worst], backward[worst] + weight[worst], stays
    )
    work = _step_time(stages[worst], setting, bubble, data, send, waits)
    time = with_upkeep(_slowed(work, factor), profile, cluster, setting)
    traffic = _traffic(setting, parts, layers, data, work)
    room = room_under(cluster, setting, parts, layers) if room is None else room
    return _cost(setting, parts, room, time, traffic, factor * stages[worst].host)


def _data(
    parts: Parts, setting: Setting, layers: tuple[tuple[int, ...], ...], forward: list[float], backward: list[float],
    weight: list[float],
) -> DataCost:  # fmt: skip
    """Of the stage whose data-parallel traffic is the most: the first or the last. Arithmetic: its blocks' sums."""
    candidates = []
    for stage in sorted({0, len(layers) - 1}):
        held = layers[stage]
        every = parameters_of(parts, held)
        around = around_of(parts, held) if setting.zero >= 3 else NOTHING_AROUND
        if is_processor(parts.cluster.device):
            candidates.append(processor_data_cost(setting, parts.axes, every, sum(held), around))
            continue
        backwards = backward[stage] + weight[stage]
        cost = data_cost(setting, parts.axes, every, sum(held), forward[stage], backwards, around)
        candidates.append(_updated_on_host(cost, parts, setting, every))
    return max(candidates, key=lambda cost: cost.exposed + cost.update)


def _updated_on_host(cost: DataCost, parts: Parts, setting: Setting, every: Parameters) -> DataCost:
    """With the host's update in the place of the device's, which keeps that of experts that are whole."""
    if not waits_on_host(setting):
        return cost
    whole = setting.experts_whole
    alone = Parameters(expert=every.expert, trained_expert=every.trained_expert) if whole else Parameters()
    kept = held_trained(setting, alone)
    here = update_seconds(parts.axes.machine, kept) if kept else 0.0
    return replace(cost, update=here + host_cost(parts.cluster, setting, every).update_seconds)


def _step_time(stage: _Stage, setting: Setting, bubble: float, data: DataCost, send: float, waits: float) -> StepTime:
    """Micro-steps one after another on the slowest stage, and the bubble (2104.04473, section 2.2)."""
    steps = setting.micro_steps
    return StepTime(
        compute=steps * (stage.forward + stage.backward + stage.weight + stage.host),
        recompute=steps * stage.again,
        tensor=steps * stage.tensor,
        context=steps * stage.context,
        expert=steps * stage.expert,
        data=data.exposed,
        pipeline=2 * steps * send,
        bubble=bubble,
        optimizer=data.update,
        offload=waits,
    )


def _cost(
    setting: Setting, parts: Parts, room: Room, time: StepTime, traffic: tuple[Traffic, ...], host_seconds: float
) -> Cost:
    """With the interval of its time, and the model's FLOPs over the devices' peak (mfu: PaLM, 2204.02311, appendix B).

    A backward is two forwards, and nothing that is recomputed counts.
    """
    seconds, machine = time.total, parts.axes.machine
    host = setting.micro_steps * host_seconds / seconds if seconds else 0.0
    known = parts.cluster.device.measured or machine.constants.family != ""
    spread = spread_of(time, parts.profile, setting, known, host)
    peak = machine.peak("bfloat16" if setting.precision in ("float8", "float4") else setting.precision)
    return Cost(
        room=room,
        time=time,
        step_seconds=Span(seconds / spread, seconds, seconds * spread),
        traffic=traffic,
        mfu=3 * parts.profile.flops * setting.global_batch / (seconds * setting.world_size * peak) if seconds else 0.0,
    )


def _traffic(
    setting: Setting, parts: Parts, layers: tuple[tuple[int, ...], ...], data: DataCost, time: StepTime
) -> tuple[Traffic, ...]:
    """A row for each axis, of the stage that sends the most: arithmetic, a step has as many of a micro-step's messages
    as micro-steps, and four in each block (1909.08053, section 3).
    """
    steps, axes = setting.micro_steps, parts.axes
    kinds = set(layers)
    rows = []
    for axis, degree, group, size, exposed in (
        ("tp", setting.tp, axes.tensor, "tensor_bytes", time.tensor),
        ("cp", setting.cp, axes.context, "context_bytes", time.context),
        ("ep", setting.ep, axes.expert, "expert_bytes", time.expert),
    ):
        if degree > 1:
            sent, held = max(
                (sum(n * getattr(cost, size) for n, cost in zip(held, parts.costs, strict=True)), held)
                for held in kinds
            )
            sent, count = steps * sent, steps * sum(held) * 4
            shown = axis != "cp"  # a ring hides messages; what the others send is waited for
            behind = 0.0 if shown else sum(n * cost.context_hidden for n, cost in zip(held, parts.costs, strict=True))
            hidden = steps * behind
            rows.append(Traffic(axis, group.link.name, sent, count, exposed + hidden, hidden))
    rows += pipeline_traffic(parts.profile, parts.cluster, setting, axes, time.pipeline)
    return (*rows, *_data_rows(axes, data))


def _data_rows(axes: Axes, data: DataCost) -> Iterator[Traffic]:
    """One row; under HSDP one of those who share parameters and one of the copies, which may have another link; and
    where ep cuts experts one of those who hold the same ones. Arithmetic: what is hidden is shared out by seconds.
    """
    copies, twins = data.copies, data.twins
    rest = data.seconds - (0.0 if twins is None else twins.seconds)
    own = 0.0 if twins is None else twins.hidden
    hidden = (data.seconds - data.exposed - own) / rest if rest else 0.0
    if copies is not None:
        shared, seconds = rest - copies.seconds, copies.seconds
        yield Traffic("dp_shard", axes.shard.link.name, data.sent_bytes, data.count, shared, hidden * shared)
        link = axes.copies.link.name
        yield Traffic("dp_replicate", link, copies.sent_bytes, copies.count, seconds, hidden * seconds)
    elif rest:
        yield Traffic("dp", axes.data.link.name, data.sent_bytes, data.count, rest, hidden * rest)
    if twins is not None:
        link = axes.twins.link.name
        yield Traffic(COPIES_OF_EXPERTS, link, twins.sent_bytes, twins.count, twins.seconds, own)
