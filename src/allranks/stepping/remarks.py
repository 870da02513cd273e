"""What is said of a training before its first step, besides what its parts have decided themselves."""

import torch

from allranks.config import Config, OptimizerConfig
from allranks.data.cut import Cut
from allranks.data.loader import Loader
from allranks.data.stream import DataStream
from allranks.layout import Layout
from allranks.parallel.precision import describe_gather, warn_of_precision
from allranks.parallel.spread import Spread
from allranks.stepping.ema import describe_ema
from allranks.stepping.optimizer import Optimizers
from allranks.stepping.schedule import Schedule
from allranks.stepping.start_check import Meeting
from allranks.stepping.transfer_cost import describe_transfers
from allranks.task import Task, has_optimizer, has_step
from allranks.units import format_seconds
from allranks.verdict import Decision


def say_at_start(
    task: Task,
    config: Config,
    spread: Spread,
    meeting: Meeting,
    stream: DataStream,
    schedule: Schedule,
    optimizers: Optimizers,
) -> tuple[Decision, ...]:
    """Every decision of the session's parts, and remarks on what has no effect or an unlikely one, in reading order."""
    loading = Loader(stream, workers=config.data.workers).decisions + _describe_cut(stream.cut, spread, config)
    loading += describe_transfers(meeting.transfers, stream.cut)
    warnings = warn_of_precision(spread.precision, spread.device.type)
    if spread.mesh.layout.fully_sharded:
        warnings += describe_gather(spread.precision, config.layout.gather)
    remarks = _unused(task, config) + _remarks(task, schedule, config, stream)
    norms = spread.batch_norms.mode is not None
    remarks = describe_idle_keys(spread.mesh.layout, own_step=has_step(task), norms=norms) + remarks
    waiting = describe_waiting(optimizers, spread.device, config.guard.spike)
    decided = spread.decisions + optimizers.decisions + meeting.decisions
    return warnings + decided + loading + remarks + waiting


def describe_waiting(optimizers: Optimizers, device: torch.device, spike: str) -> tuple[Decision, ...]:
    """Said where the host has to wait for the device in every step, to know whether the update is left out."""
    judged = {"skip": "gradient norm", "rollback": "loss"}.get(spike)
    if judged is not None and device.type != "cpu":
        return (Decision(f"each step waits for the device once, to see its {judged}", f"guard.spike={spike}"),)
    waiting = {
        type(optimizer).__name__
        for which, optimizer in optimizers.by_name.items()
        if device.type != "cpu" and not optimizers.skips_on_device(which, device)
    }
    if not waiting:
        return ()
    because = f"{', '.join(sorted(waiting))} cannot leave an update out by itself; torch's fused Adam and AdamW can"
    return (Decision("each step waits for the device once, to see whether its gradients are finite", because),)


def describe_idle_keys(layout: Layout, *, own_step: bool = False, norms: bool = True) -> tuple[Decision, ...]:
    """Keys of the section layout that are not as by default, and of which nothing in this layout makes use.

    Args:
        own_step: whether the Task has a step() of its own, which DDP has no part in.
        norms: whether the model may have a BatchNorm.
    """
    none, ddp = "and this layout has none", layout.replicated and layout.pp == 1
    without = f"for DDP, {'and a step() of its own goes without' if ddp else none}"
    whose = "for BatchNorm, and the model has none"
    if layout.sample_ranks == 1:
        whose = "for several data-parallel ranks, and this layout has one"
    found = []
    for names, used, what_for in (
        (("static_graph", "ddp_bucket_mb"), ddp and not own_step, without),
        (("gather", "prefetch"), layout.fully_sharded, f"for parameters that are sharded, {none}"),
        (("powersgd_rank", "powersgd_start"), layout.ddp_hook == "powersgd", "for layout.ddp_hook=powersgd"),
        (("outer_lr", "outer_momentum", "outer_nesterov"), layout.local_sgd is not None, "for layout.local_sgd"),
        (("context",), layout.cp > 1, f"for cp, {none}"),
        (("schedule",), layout.pp > 1, f"for pp, {none}"),
        (("batchnorm",), norms and layout.sample_ranks > 1, whose),
    ):
        given = [f"layout.{name}" for name, _ in layout.differing() if name in names and not used]
        if given:
            verb, they = ("has", "it is") if len(given) == 1 else ("have", "they are")
            found.append(Decision(f"{', '.join(given)} {verb} no effect", f"{they} {what_for}"))
    return tuple(found)


def _describe_cut(cut: Cut, spread: Spread, config: Config) -> tuple[Decision, ...]:
    """How a step goes through a pipeline, and how long its stages wait."""
    layout, number = spread.mesh.layout, cut.num_micro_steps()
    if spread.stages is None:
        return ()
    what = f"a step passes the {layout.num_stages} stages in {number} micro-steps of {cut.micro_batch} samples"
    # Each process runs its stages for every micro-step, and waits for those before and after it (arXiv 2104.04473).
    work = number * layout.num_stages // layout.pp
    waits = f"schedule={layout.schedule} waits {(layout.pp - 1) / (work + layout.pp - 1):.0%} of the time or less"
    given = config.train.micro_steps or config.train.micro_batch
    return (Decision(what, waits if given else f"train.micro_steps is not given; {waits}"),)


def _unused(task: Task, config: Config) -> tuple[Decision, ...]:
    """What was given and has no effect with this Task, said instead of ignored."""
    found = []
    if has_optimizer(task):
        given, usual = config.optimizer.model_dump(), OptimizerConfig().model_dump()
        names = ", ".join(f"optimizer.{name}" for name, value in given.items() if value != usual[name])
        if names:
            found.append(Decision(f"{names} has no effect", f"{type(task).__name__}.optimizer() makes the optimizer"))
    if has_step(task):
        what = "nothing is evaluated while it trains, and metrics() is not called"
        found.append(Decision(what, f"{type(task).__name__} has a step() of its own"))
    return tuple(found)


def _remarks(task: Task, schedule: Schedule, config: Config, stream: DataStream) -> tuple[Decision, ...]:
    """What a schedule does that nobody may have meant."""
    batch, steps, ema = config.train.global_batch, stream.steps_total, config.train.ema
    evaluates = config.evaluate.every != 0 and not has_step(task)
    found = [] if ema is None else [*describe_ema(ema, steps, evaluates=evaluates)]
    if stream.left_out.ranges:
        number = sum(past - first for first, past in stream.left_out.ranges)
        found.append(Decision(f"{number} samples are left out, at positions {stream.left_out}", "data.skip names them"))
    if config.guard.spike == "rollback" and config.checkpoint.every is None and config.checkpoint.memory_every is None:
        seconds = config.checkpoint.every_seconds
        what = "begin anew" if seconds is None else f"go back by up to {format_seconds(seconds)}"
        off = " (checkpoint.seconds is 0)" if seconds is None else ""
        because = f"guard.spike=rollback goes back to a checkpoint, and checkpoint.every is not given{off}"
        found.append(Decision(f"a spike has the run {what}", because))
    falls = schedule.name != "constant"
    if falls and schedule.warmup_samples >= schedule.total_samples:
        what = f"the rate never reaches its peak: warm-up takes {schedule.warmup_samples // batch} steps"
        found.append(
            Decision(what, f"the schedule ends at step {schedule.total_samples // batch}: see schedule.warmup")
        )
    if falls and steps is not None and schedule.total_samples // batch < steps:
        what = f"from step {schedule.total_samples // batch} on the rate is {schedule.floor:g} of its peak"
        because = (
            "the schedule of the first start ends there; `--change schedule.steps schedule.steps=N` makes it N steps"
        )
        found.append(Decision(what, because))
    return tuple(found)
