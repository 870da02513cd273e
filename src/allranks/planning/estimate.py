"""estimate: what a Choice costs on a Cluster. Pure: the same arguments give the same Estimate."""

from dataclasses import dataclass, fields, replace
from typing import final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Estimate, MemoryUse, Span, StepTime, Traffic
from allranks.planning.axis_traffic import Axes, axes_of
from allranks.planning.block_cost import BlockCost, block_cost
from allranks.planning.corrections import factor_of
from allranks.planning.data_traffic import DataCost, data_cost
from allranks.planning.host_parameters import host_cost, waits_on_host
from allranks.planning.host_traffic import host_bytes, host_capacity_bytes, host_seconds, moves
from allranks.planning.memory import memory_use, slack_bytes
from allranks.planning.pipeline import pipeline_seconds, shared_bubble, under_way
from allranks.planning.pipeline_traffic import hop_seconds, pipeline_traffic
from allranks.planning.processor import is_processor
from allranks.planning.processor_traffic import on_processor, processor_data_cost
from allranks.planning.setting import Setting, setting_of
from allranks.planning.stages import stages_under
from allranks.planning.uncertainty import spread_of

MEMORY_LOW, MEMORY_HIGH, PEAK_HIGH = 0.94, 1.03, 1.08
"""Published peaks lie between the first times what is in use and the last times the expected peak, 5% on either side
aside. What the allocator holds beyond what is in use goes back where the device runs full: a fit is what has room for
the second times what is in use. See docs/explanation/planner.md."""
USABLE = 0.985
"""Of a device's memory: the driver keeps the rest (an A100 80 GB gives 79.15 GiB to torch, an H100 79.1)."""
MEETING = 6.0
"""Host and device wait for each other where neither is clearly the faster: the step is the norm of this order of both,
12% above them where they are equal."""


@final
@dataclass(frozen=True, slots=True)
class Cost:
    """What a Setting costs: an Estimate without its Choice."""

    memory: MemoryUse
    stages: dict[int, MemoryUse]
    peak_bytes: Span
    capacity_bytes: float
    context_bytes: float
    slack_bytes: float
    time: StepTime
    step_seconds: Span
    traffic: tuple[Traffic, ...]
    mfu: float
    host_bytes: float = 0.0


def estimate(profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
    """Memory, time and traffic of one optimizer step under `choice`."""
    cost = estimate_setting(profile, cluster, setting_of(choice))
    factor = factor_of(cluster, choice.layout)
    span, seconds = _times(cost.step_seconds, factor), factor * cost.step_seconds.expected
    samples = choice.global_batch / seconds if seconds else 0.0
    return Estimate(
        choice=choice,
        memory=cost.memory,
        stages=cost.stages,
        peak_bytes=cost.peak_bytes,
        capacity_bytes=cost.capacity_bytes,
        time=cost.time if factor == 1.0 else _slowed(cost.time, factor),
        step_seconds=span,
        traffic=cost.traffic,
        mfu=cost.mfu / factor,
        samples_per_second=samples,
        tokens_per_second=samples * profile.tokens,
        host_bytes=cost.host_bytes,
        host_capacity_bytes=host_capacity_bytes(cluster),
        correction=factor,
    )


def _times(span: Span, factor: float) -> Span:
    return Span(factor * span.low, factor * span.expected, factor * span.high)


def _slowed(time: StepTime, factor: float) -> StepTime:
    return StepTime(**{part.name: factor * getattr(time, part.name) for part in fields(StepTime)})


@final
@dataclass(frozen=True, slots=True)
class _Parts:
    """A profile's blocks under one Setting; kept for the next call that differs in nothing that they depend on."""

    profile: ModelProfile
    cluster: Cluster
    axes: Axes
    costs: tuple[BlockCost, ...]


_CACHE: dict[tuple[object, ...], _Parts] = {}
_COSTS: dict[tuple[object, ...], tuple[ModelProfile, Cluster, tuple[BlockCost, ...]]] = {}
_CACHE_SIZE = 20_000


def _parts(profile: ModelProfile, cluster: Cluster, setting: Setting) -> _Parts:
    of_block = (
        id(profile), id(cluster), setting.tp, setting.cp, setting.ep, setting.micro_batch, setting.recompute,
        setting.precision, setting.ring, setting.frozen, setting.mechanisms, setting.cuts_positions,
    )  # fmt: skip
    key = (of_block, setting.dp, setting.pp, setting.shard)
    found = _CACHE.get(key)
    if found is not None:  # it holds its profile and cluster, so their ids are not given to others
        return found
    if len(_CACHE) >= _CACHE_SIZE:
        _CACHE.clear()
        _COSTS.clear()
    axes = axes_of(cluster, setting)
    if of_block not in _COSTS:  # a block costs the same whoever shares it, and however many copies there are
        costs = tuple(block_cost(block, setting, axes, profile.experts) for block in profile.blocks)
        _COSTS[of_block] = profile, cluster, costs
    parts = _CACHE[key] = _Parts(profile, cluster, axes, _COSTS[of_block][2])
    return parts


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
    """Seconds of one micro-step on one stage; where the host is slower than the device, the difference is host."""
    how = setting.mechanisms
    sums = [0.0] * 7 + [how.fixed.micro_step]
    for count, cost in zip(held, costs, strict=True):
        if count:
            exposed = (1 - how.overlap_tensor) * (cost.tensor + cost.tensor_again)
            kernels = cost.kernels * (3 + (1 if cost.again > 0.5 * cost.forward else 0))
            dispatched = (kernels + cost.collectives * 3 * how.collective_kernels) * how.dispatch_seconds
            device = cost.forward + cost.backward + cost.weight + cost.again + exposed
            parts = (
                *(cost.forward, cost.backward, cost.weight, cost.again, exposed, cost.context, cost.expert),
                (device**MEETING + dispatched**MEETING) ** (1 / MEETING) - device + kernels * how.fixed.operation,
            )
            sums = [total + count * part for total, part in zip(sums, parts, strict=True)]
    return _Stage(*sums)


def estimate_setting(profile: ModelProfile, cluster: Cluster, setting: Setting) -> Cost:
    """The same for a Setting, which may be another framework's."""
    setting = on_processor(setting, cluster, profile)
    parts = _parts(profile, cluster, setting)
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
        work = setting.micro_steps * (sum(forward) + sum(backward) + sum(weight)) / setting.pp
        bubble = shared_bubble(steady, bubble, work, setting.mechanisms.cores)
    worst = max(range(len(stages)), key=lambda i: forward[i] + backward[i] + weight[i])
    data = _data(parts, setting, layers, forward, backward, weight)
    held = layers[worst]
    stays = host_cost(cluster, setting, *_parameters(parts, held))
    waits = host_seconds(
        profile, cluster, setting, parts.costs, held, forward[worst], backward[worst] + weight[worst], stays
    )
    time = _step_time(stages[worst], setting, bubble, data, send, waits)
    return _cost(profile, cluster, setting, parts, layers, time, data, stages[worst].host)


def _data(
    parts: _Parts, setting: Setting, layers: tuple[tuple[int, ...], ...], forward: list[float], backward: list[float],
    weight: list[float],
) -> DataCost:  # fmt: skip
    """Of the stage whose data-parallel traffic is the most: the first or the last."""
    candidates = []
    for stage in sorted({0, len(layers) - 1}):
        held = layers[stage]
        dense, expert = _parameters(parts, held)
        if is_processor(parts.cluster.device):
            candidates.append(processor_data_cost(setting, parts.axes, dense, expert, sum(held)))
            continue
        cost = data_cost(setting, parts.axes, dense, expert, sum(held), forward[stage], backward[stage] + weight[stage])
        candidates.append(_updated_on_host(cost, parts, setting, dense, expert))
    return max(candidates, key=lambda cost: cost.exposed + cost.update)


def _parameters(parts: _Parts, held: tuple[int, ...]) -> tuple[float, float]:
    """(Those that tp alone cuts, experts') of a stage that holds so many of each block."""
    dense = sum(n * cost.parameters for n, cost in zip(held, parts.costs, strict=True))
    return dense, sum(n * cost.expert_parameters for n, cost in zip(held, parts.costs, strict=True))


def _updated_on_host(cost: DataCost, parts: _Parts, setting: Setting, dense: float, expert: float) -> DataCost:
    """With the host's update in the place of the device's, which keeps that of experts that ep cuts."""
    if not waits_on_host(setting):
        return cost
    kept = expert / (dense + expert) if setting.ep > 1 else 0.0
    update = host_cost(parts.cluster, setting, dense, expert).update_seconds
    return replace(cost, update=kept * cost.update + update)


def _step_time(stage: _Stage, setting: Setting, bubble: float, data: DataCost, send: float, waits: float) -> StepTime:
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
    profile: ModelProfile, cluster: Cluster, setting: Setting, parts: _Parts, layers: tuple[tuple[int, ...], ...],
    time: StepTime, data: DataCost, host_seconds: float,
) -> Cost:  # fmt: skip
    # Of equal stages the first holds the most micro-steps.
    first = {held: stage for stage, held in reversed(tuple(enumerate(layers)))}
    ends = sorted({0, len(layers) // 2, len(layers) - 1, *first.values()})
    stages = {stage: memory_use(profile, setting, parts.costs, layers[stage], stage) for stage in ends}
    memory = max(stages.values(), key=lambda use: use.total)
    seconds = time.total
    host = setting.micro_steps * host_seconds / seconds if seconds else 0.0
    known = cluster.device.measured or parts.axes.machine.constants.family != ""
    spread = spread_of(time, profile, setting, known, host)
    peak = parts.axes.machine.peak("bfloat16" if setting.precision in ("float8", "float4") else setting.precision)
    devices = setting.dp * setting.tp * setting.cp * setting.pp
    mfu = 3 * profile.flops * setting.global_batch / (seconds * devices * peak) if seconds else 0.0
    capacity = USABLE * cluster.device.memory_bytes
    slack = slack_bytes(setting, memory, capacity)
    peak = memory.total + slack
    high = max(peak, MEMORY_HIGH * memory.total, min(PEAK_HIGH * peak, capacity))
    return Cost(
        memory=memory,
        stages=stages,
        peak_bytes=Span(MEMORY_LOW * memory.total, peak, high),
        capacity_bytes=capacity,
        slack_bytes=slack,
        context_bytes=setting.mechanisms.context_bytes,
        time=time,
        step_seconds=Span(seconds / spread, seconds, seconds * spread),
        traffic=_traffic(setting, parts, layers, data, time),
        mfu=mfu,
        host_bytes=_host_bytes(profile, cluster, setting, parts, layers),
    )


def _host_bytes(
    profile: ModelProfile, cluster: Cluster, setting: Setting, parts: _Parts, layers: tuple[tuple[int, ...], ...]
) -> float:
    """Of a node whose devices all are of the first stage, which has the most micro-steps under way, or of the last."""
    if setting.offload == "none":
        return 0.0
    kept = max(host_cost(cluster, setting, *_parameters(parts, held)).kept_bytes for held in (layers[0], layers[-1]))
    if moves(setting):
        times = under_way(setting.schedule, 0, setting.pp, setting.chunks, setting.micro_steps)
        kept += host_bytes(profile, parts.costs, layers[0], times)
    return cluster.devices_per_node * kept


def _traffic(
    setting: Setting, parts: _Parts, layers: tuple[tuple[int, ...], ...], data: DataCost, time: StepTime
) -> tuple[Traffic, ...]:
    held, steps, axes = layers[0], setting.micro_steps, parts.axes
    rows = []
    for axis, degree, group, size, exposed in (
        ("tp", setting.tp, axes.tensor, "tensor_bytes", time.tensor),
        ("cp", setting.cp, axes.context, "context_bytes", time.context),
        ("ep", setting.ep, axes.expert, "expert_bytes", time.expert),
    ):
        if degree > 1:
            sent = steps * sum(n * getattr(cost, size) for n, cost in zip(held, parts.costs, strict=True))
            count = steps * sum(n for n in held) * 4
            rows.append(Traffic(axis, group.link.name, sent, count, exposed, 0.0))
    rows += pipeline_traffic(parts.profile, parts.cluster, setting, axes, time.pipeline)
    if data.seconds:
        link = axes.data.link.name
        rows.append(Traffic("dp", link, data.sent_bytes, data.count, data.seconds, data.seconds - data.exposed))
    return tuple(rows)
