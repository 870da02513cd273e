"""Everything that one training needs, assembled from values: Task, config and processes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from allranks.config import Config
from allranks.data.cut import cut_step, samples_a_forward
from allranks.data.loader import Loader
from allranks.data.random_keys import seed_all
from allranks.data.stream import DataStream, declared_order, draws
from allranks.errors import ConfigError
from allranks.observing.counters import Stopwatch
from allranks.parallel.batchnorm import has_batch_statistics
from allranks.parallel.initial import Build
from allranks.parallel.parallelize import parallelize
from allranks.parallel.precision import choose_precision
from allranks.parallel.spread import Spread
from allranks.stepping.agreement import Agreement
from allranks.stepping.alike import check_same_code, check_same_start
from allranks.stepping.alternating import AlternatingPasses
from allranks.stepping.ema import Ema
from allranks.stepping.guards import StepGuard
from allranks.stepping.last_step import fit_last_step
from allranks.stepping.loss_window import LossWindow, make_window
from allranks.stepping.optimizer import Optimizers, build_optimizers
from allranks.stepping.outer import OuterOptimizer, make_outer
from allranks.stepping.passes import Forward, Passes, PlainPasses
from allranks.stepping.posting import Posted, post_all
from allranks.stepping.remarks import say_at_start
from allranks.stepping.scaler import Scaler
from allranks.stepping.schedule import Schedule
from allranks.stepping.scheduled import ScheduledPasses
from allranks.stepping.spikes import SpikeJudge, make_judge
from allranks.stepping.stage_cost import count_between
from allranks.stepping.start_check import Meeting, check_at_start, check_coupling
from allranks.stepping.step import Step
from allranks.stepping.world import Processes
from allranks.task import Task, has_step
from allranks.verdict import Decision


@dataclass(frozen=True)
class Session:
    """One training, ready to start.

    Attributes:
        stream: the order of samples and the position in it.
        loader: this rank's batches.
        step: one optimizer step.
        validation: the validation split, or None.
        decisions: what was chosen, with because.
        flops_per_sample: of a forward and a backward; None where they cannot be counted.
        beside: what has tensors for a checkpoint besides model and optimizers.
        fixed: whether what is learnt depends on which samples share a forward.
        posted: the sentinels that watch over it.
    """

    task: Task
    config: Config
    processes: Processes
    spread: Spread
    forward: Forward
    optimizers: Optimizers
    schedule: Schedule
    stream: DataStream
    count_targets: Callable[[Any], int] | None
    step: Step
    validation: Any
    decisions: tuple[Decision, ...]
    flops_per_sample: float | None = None
    beside: tuple[Ema | Scaler | SpikeJudge | LossWindow, ...] = ()
    fixed: bool = False
    posted: Posted = field(default_factory=Posted)

    @property
    def ema(self) -> Ema | None:
        """An average that follows the parameters; None for none."""
        return next((other for other in self.beside if isinstance(other, Ema)), None)

    @property
    def spikes(self) -> SpikeJudge | None:
        """What leaves out steps whose gradient norm is a spike; None for none."""
        return next((other for other in self.beside if isinstance(other, SpikeJudge)), None)

    @property
    def losses(self) -> LossWindow | None:
        """What tells spikes of the loss, behind which the run goes back; None for none."""
        return next((other for other in self.beside if isinstance(other, LossWindow)), None)

    @property
    def outer(self) -> OuterOptimizer | None:
        """What puts the copies of local_sgd together; None without."""
        return self.step.outer

    def loader(self) -> Loader:
        """This rank's batches from the stream's position on."""
        return Loader(
            self.stream,
            collate=self.task.collate,
            workers=self.config.data.workers,
            count_targets=self.count_targets,
            draws=draws(self.stream.dataset),
            pin=self.processes.device.type == "cuda",
        )


def assemble(
    task: Task,
    config: Config,
    processes: Processes,
    stopwatch: Stopwatch,
    stop_requested: Callable[[], tuple[bool, bool]],
    *,
    kept_schedule: Schedule | None = None,
    observe: Callable[[Passes], Passes] = lambda passes: passes,
) -> Session:
    """Build the model, the data and the step; collective. Raises the errors of bad input that only a worker can see.

    Args:
        stop_requested: (Ctrl-C, terminate) as this rank has seen them so far.
        kept_schedule: that of the first start, where this is a resume.
        observe: wraps the passes, to look at gradients as they are made.
    """
    dataset = _open_dataset(task, config, processes)
    spread = spread_task(task, config, processes, dataset)
    optimizers = build_optimizers(spread, config.optimizer, task.optimizer)
    outer = make_outer(spread, order=declared_order(dataset))
    meeting, fixed = _meet(task, spread, dataset, config, processes)
    stream, meeting = _open_alike(dataset, config, processes, meeting, fixed=fixed)
    schedule = kept_schedule or make_schedule(config, stream)
    ema, scaler, spikes, _ = beside = _make_beside(task, config, spread, processes)
    posted = post_all(config, processes, meeting.forward, optimizers, schedule, stream, beside, fixed=fixed)
    step = Step(
        spread,
        observe(make_passes(task, meeting.forward, optimizers, processes)),
        optimizers,
        schedule,
        make_agreement(processes),
        max_norm=config.train.max_norm,
        stop_requested=stop_requested,
        stopwatch=stopwatch,
        outer=outer,
        ema=ema,
        scaler=scaler,
        guard=StepGuard(spread, spikes),
        watch=posted.watch,
    )
    return Session(
        task=task,
        config=config,
        processes=processes,
        spread=spread,
        forward=meeting.forward,
        optimizers=optimizers,
        schedule=schedule,
        stream=stream,
        count_targets=meeting.count_targets,
        step=step,
        validation=None if has_step(task) else task.dataset("validation"),
        decisions=processes.choice.decisions
        + say_at_start(task, config, spread, meeting, stream, schedule, optimizers),
        flops_per_sample=meeting.flops_per_sample,
        beside=tuple(other for other in beside if other is not None),
        fixed=fixed,
        posted=posted,
    )


def _meet(task: Task, spread: Spread, dataset: Any, config: Config, processes: Processes) -> tuple[Meeting, bool]:
    """What the Task's functions do with its samples, and whether it matters which samples share a forward."""
    most, group = samples_a_forward(config.train, processes.mesh.layout), processes.data_group
    meeting = check_at_start(
        task, spread, dataset, config.train.seed, draws=draws(dataset), group=group, micro_batch=most
    )
    spread.path.take()  # of the check, which each rank may make on samples of its own
    check_coupling(task, meeting, processes.mesh.layout)
    return meeting, meeting.coupled or has_batch_statistics(spread.modules)


def _make_beside(
    task: Task, config: Config, spread: Spread, processes: Processes
) -> tuple[Ema | None, Scaler | None, SpikeJudge | None, LossWindow | None]:
    ema = None if config.train.ema is None else Ema(spread, config.train.ema)
    scaler = Scaler(processes.device, processes.world_group) if spread.precision.scales else None
    return ema, scaler, make_judge(task, config, processes), make_window(task, config, processes)


def _open_dataset(task: Task, config: Config, processes: Processes) -> Any:
    check_same_code(type(task), processes.world_group, processes.device)
    if config.train.deterministic:
        be_deterministic(processes.device)
    dataset = task.dataset("train")
    declared_order(dataset)
    return dataset


def _open_alike(
    dataset: Any, config: Config, processes: Processes, meeting: Meeting, *, fixed: bool
) -> tuple[DataStream, Meeting]:
    """The stream, of which every rank has the same, and what is known now that its end is."""
    stream = open_stream(dataset, config, processes, fixed=fixed)
    # Where the Task's file lies is each host's own business.
    settings = {key: value for key, value in config.flat().items() if key != "task.spec"}
    check_same_start(settings, stream.num_samples, processes.world_group, processes.device)
    return stream, fit_last_step(stream, meeting, processes)


def make_agreement(processes: Processes) -> Agreement:
    """What every step agrees by, on every rank; each loss and each sample is told once."""
    mesh = processes.mesh
    return Agreement(
        processes.agreement,
        processes.device,
        counts=mesh.counts,
        adds_loss=mesh.adds_loss,
        stage=mesh.coordinate("pp"),
        num_stages=mesh.layout.pp,
    )


def spread_task(task: Task, config: Config, processes: Processes, dataset: Any, build: Build | None = None) -> Spread:
    """The Task's model (or what `build` makes), spread as the config says, stages by `dataset`'s start; collective."""
    layout, hints = processes.mesh.layout, task.hints()
    precision = choose_precision(config.train.precision, layout.gather, processes.device.type)
    return parallelize(
        build or task.model,
        processes.mesh,
        precision,
        processes.device,
        source=processes.host_source(),
        seed=partial(seed_all, model_key(config.train.seed)),
        blocks=hints.blocks,
        split_before=hints.split_before,
        tensor=hints.tensor,
        loss_parallel=hints.loss_parallel,
        batchnorm=hints.batchnorm,
        optional=hints.optional,
        # A step of its own may leave out whole models in a backward; its passes reduce what a loss has touched.
        ddp=not has_step(task),
        find_unused=has_step(task),
        training=True,
        count=partial(count_between, task, dataset, config.train.seed, precision),
    )


def open_stream(dataset: Any, config: Config, processes: Processes, *, fixed: bool) -> DataStream:
    """The order of the samples, and this rank's part; `fixed`: whether M may not depend on the number of ranks."""
    return DataStream(
        dataset,
        cut=cut_step(config.train, processes.mesh.layout, fixed=fixed),
        dp_rank=processes.mesh.dp_rank,
        seed=config.train.seed,
        epochs=config.train.epochs,
        steps=config.train.steps,
        left_out=config.data.left_out,
    )


def make_passes(task: Task, forward: Forward, optimizers: Optimizers, processes: Processes) -> Passes:
    """How a step of this Task goes forward and backward."""
    if has_step(task):
        return AlternatingPasses(forward, optimizers, processes.data_group)
    if forward.spread.stages is not None:
        return ScheduledPasses(forward)
    return PlainPasses(forward)


def be_deterministic(device: torch.device) -> None:
    """Let this process use deterministic kernels only; before its first matrix product."""
    if device.type == "cuda":
        # cuBLAS reads it when it begins, and torch refuses matrix products without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def model_key(seed: int) -> int:
    """The key of the generators while `model()` runs: `torch.manual_seed(train.seed)` gives the same model (law 5)."""
    return seed


def make_schedule(config: Config, stream: DataStream) -> Schedule:
    """The schedule in samples; one that falls needs to know where it ends: where it would if nothing were left out.

    So a rollback, which keeps the schedule, and `data.skip` from the first start on give the same rates.
    """
    batch = config.train.global_batch
    steps = config.schedule.steps or config.train.steps or stream.steps_in_full
    if steps is None and config.schedule.name != "constant":
        raise ConfigError(
            f"schedule.name={config.schedule.name}: the dataset does not say how many samples it has, so the end is "
            "unknown: set train.steps or schedule.steps"
        )
    return Schedule(config.schedule.name, config.schedule.warmup * batch, (steps or 0) * batch, config.schedule.floor)
