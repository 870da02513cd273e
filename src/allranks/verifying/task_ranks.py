"""A Task in this process as training has it: the real session and step, watched from outside."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.utils.data import Subset

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.config import Config
from allranks.data.micro_step import StepBatch
from allranks.launching.environment import read_environment
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import choose_device, start, stop
from allranks.parallel.precision import choose_precision
from allranks.request import TrainRequest
from allranks.stepping.passes import Passes
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import Processes, gather_processes
from allranks.task import Task, has_step
from allranks.training.prepare import prepare, resolve_layout
from allranks.training.saver import Saver
from allranks.training.snapshot import Contents, find_checkpoint, kept_schedule, schedule_state
from allranks.training.validate import validate
from allranks.verifying.choosing import Choosing
from allranks.verifying.observation import comparable
from allranks.verifying.observer import Observer
from allranks.verifying.own_loop import default_dtype
from allranks.verifying.passes_watch import (
    WatchedPasses,
    evaluation_told,
    forwards_told,
    rows_in_work,
    rows_of_step,
    scaler_of,
    values_of_step,
)
from allranks.verifying.recording import Part, Parts, RunRecord, Start, StepRecord
from allranks.verifying.routing import Recorded, Replayer
from allranks.verifying.shrinking import shrink
from allranks.verifying.update_state import settings_of

BACKEND_TIMEOUT_SECONDS = 120.0
RUN_ID, MOST_VALIDATED = "verify", 61


@final
@dataclass(frozen=True)
class Errand:
    """What the ranks of a Task are told.

    Attributes:
        request: the Task, its config and layout, as training takes them.
        num_steps: of training.
        folder: where the checkpoint goes.
        saves: the steps before which it is saved: each by the run that the one before was loaded into.
        resume: whether to begin with the checkpoint that lies in `folder`.
        scale: of the losses under float16, from the first step on; None: the run's own.
        recorded: what one device has chosen, to be chosen again; None: everything chooses by itself.
        evaluate: whether to measure the validation samples in the end.
        keep: repeats that are kept of each row of equal blocks; None: all. least_dims: see Observer.
        forwards: of a step on each rank; stateful: whether one moves state of its own, and one device makes as many.
    """

    request: TrainRequest
    num_steps: int
    folder: str
    saves: tuple[int, ...] = ()
    resume: bool = False
    scale: float | None = None
    recorded: Recorded | None = None
    evaluate: bool = True
    keep: int | None = None
    forwards: int = 1
    stateful: bool = False
    least_dims: int = 1


@final
@dataclass(frozen=True)
class TaskRecord:
    """What a rank did, and who it is.

    Attributes:
        data_rank: the number of the samples that it sees.
        axes: the layout's degrees above 1.
        layout: as printed.
        recognised: rows of a batch that choose something, and were found again among those of one device.
        replayed: of these, those that chose what one device has chosen, and not what they would have.
    """

    run: RunRecord
    data_rank: int = 0
    axes: Mapping[str, int] | None = None
    layout: str = ""
    recognised: int = 0
    replayed: int = 0


def shorten_validation(task: Task) -> list[int]:
    """Let the validation split of this very Task end after some samples: a number that no world size divides.

    Returns what becomes the numbers of samples that a split had that was cut, as it is asked for.
    """
    whole, cut = task.dataset, list[int]()

    def dataset(split: str) -> Any:
        samples = whole(split)
        long = split == "validation" and hasattr(samples, "__len__") and len(samples) > MOST_VALIDATED
        if not long or not hasattr(samples, "__getitem__"):
            return samples
        cut.append(len(samples))
        return Subset(samples, range(MOST_VALIDATED))

    task.dataset = dataset  # type: ignore[method-assign]
    return cut


def run_task_rank(errand: Errand) -> TaskRecord:
    """One rank; runs in a process that `launch` has started."""
    environment = read_environment(os.environ)
    prepared = prepare(errand.request)
    layout = resolve_layout(prepared.config, environment.world_size, environment.num_nodes)
    choice = choose_device(environment, "cpu", "auto", layout)  # the run's own backend may be one for GPUs
    start(environment, choice, timeout_seconds=BACKEND_TIMEOUT_SECONDS)
    observer = Observer(least_dims=errand.least_dims)
    try:
        exact = prepared.config.train.precision == "float64"
        with observer.watching(), default_dtype(torch.float64 if exact else None):
            shorten_validation(prepared.task)
            shrink(prepared.task, errand.keep)
            processes = gather_processes(environment, choice, layout)
            data_rank = processes.mesh.dp_rank
            run = _Run(errand, prepared.task, prepared.config, processes, observer)
            record = run.go()
    finally:
        stop()
    degrees = {axis: getattr(layout, axis) for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")}
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1}
    return TaskRecord(record, data_rank, axes, str(layout), *run.routed)


@final
class _Run:
    """Assemble, perhaps resume, step, save, evaluate."""

    def __init__(self, errand: Errand, task: Task, config: Config, processes: Processes, observer: Observer) -> None:
        self._errand, self._task, self._config = errand, task, config
        self._processes, self._observer = processes, observer
        low = choose_precision(config.train.precision, "float32", "cpu").compute
        self._replayer = None if not errand.recorded or low is None else Replayer(errand.recorded, low)

    @property
    def routed(self) -> tuple[int, int]:
        """(rows that were recognised, those that were replayed)."""
        return (0, 0) if self._replayer is None else (self._replayer.recognised, self._replayer.replayed)

    def go(self) -> RunRecord:
        """The steps from the start, or from the checkpoint on; then the same from each save, where there are some."""
        record = run = self._train(resume=self._errand.resume, evaluate=self._errand.evaluate)
        while run.saved_before:
            run.resumed = self._train(resume=True, evaluate=False)
            run = run.resumed
        return record

    def _train(self, resume: bool, evaluate: bool) -> RunRecord:
        watching: list[WatchedPasses] = []
        self._observer.feed([])

        def observe(passes: Passes) -> Passes:
            watching.append(WatchedPasses(passes))
            return watching[0]

        checkpoint = None
        if resume:
            checkpoint, _ = find_checkpoint(Path(self._errand.folder), RUN_ID, self._processes)
        session = assemble(
            self._task,
            self._config,
            self._processes,
            Stopwatch(),
            lambda: (False, False),
            observe=observe,
            kept_schedule=kept_schedule(checkpoint, self._config.schedule),
        )
        watching[0].session = session
        contents = _contents(session)
        record = RunRecord(unclaimed=self._observer.unclaimed)
        if checkpoint is not None:
            contents.load(checkpoint)
            record.first = checkpoint.step
        record.start = _start(session)
        scaler = scaler_of(session)
        if scaler is not None and self._errand.scale is not None:
            scaler.scale.fill_(self._errand.scale)
        choosing = None if self._replayer is None else Choosing(self._replayer.decide)
        told = nullcontext() if has_step(self._task) else forwards_told(self._observer.begin_forward)
        with told, nullcontext() if choosing is None else choosing.within(session.spread.modules):
            self._step_through(session, watching[0], contents, record)
        record.compiled = self._observer.compiled
        if evaluate:
            self._observer.feed([])  # what is dropped here is no step's
            with evaluation_told(self._observer.begin_forward):
                record.evaluation = validate(session) or None
        return record

    def _step_through(self, session: Session, watching: WatchedPasses, contents: Contents, record: RunRecord) -> None:
        due = next((step for step in self._errand.saves if step > record.first), None)
        with session.loader() as loader:
            batch: StepBatch | None = next(loader, None)
            if batch is None:
                return
            before = session.step.agree_first(batch)
            for index in range(record.first, self._errand.num_steps):
                if batch is None:
                    break
                watching.step = step = StepRecord(batch_sizes=tuple(len(m.positions) for m in batch.micro_steps))
                step.rows, step.values = rows_of_step(batch), values_of_step(batch)
                self._observer.feed(rows_in_work(batch, turns=has_step(self._task)), step.draws)
                outcome = session.step.run(batch, before, lambda: next(loader, None))
                session.stream.take(batch)
                _finish(session, step, batch, outcome, before)
                record.steps.append(step)
                before, batch = outcome.pending, outcome.upcoming
                if due == index + 1:
                    self._save(session, contents, due)
                    record.saved_before = due

    def _save(self, session: Session, contents: Contents, step: int) -> Checkpoint:
        folder = Path(self._errand.folder)
        folder.mkdir(parents=True, exist_ok=True)
        saver = Saver(contents, self._processes, self._config.checkpoint, folder, RUN_ID, 1)
        return Checkpoint.open(saver.save(step), run_id=RUN_ID)


def _contents(session: Session) -> Contents:
    return Contents(
        session.spread,
        session.optimizers,
        session.stream,
        extra=schedule_state(session.schedule, session.config.schedule),
        task=session.task,
        outer=session.outer,
        beside=session.beside,
    )


def _start(session: Session) -> Start:
    spread = session.spread
    tied: dict[str, list[str]] = {}
    for name, entry in spread.map.items():
        if entry.alias_of is not None:
            tied.setdefault(entry.alias_of, [entry.alias_of]).append(name)
    held = {id(p) for which in session.optimizers.by_name for p in session.optimizers.parameters(which)}
    return Start(
        parameters=_parts(session, "parameter"),
        buffers=_parts(session, "buffer"),
        tied=[tuple(some) for some in tied.values()],
        unlinked=[name for name, tensor in spread.trainable().items() if id(tensor) not in held],
        optimizers=[type(one).__name__ for one in session.optimizers.by_name.values()],
    )


def _parts(session: Session, kind: str) -> Parts:
    spread = session.spread
    return {
        name: Part(entry.box, comparable(spread.local(name).detach()))
        for name, entry in spread.map.items()
        if entry.kind == kind and entry.alias_of is None
    }


def _finish(session: Session, step: StepRecord, batch: StepBatch, outcome: Any, before: Any) -> None:
    values = outcome.values(before, batch.size)
    step.loss, step.norm = float(values["loss"]), float(outcome.grad_norm)
    step.kept = {"ledger": Part(None, ledger(str(values["ledger"])))}
    every = session.optimizers.by_name.values()
    step.settings = [settings_of(group) for optimizer in every for group in optimizer.param_groups]
    step.parameters, step.buffers = _parts(session, "parameter"), _parts(session, "buffer")
    step.state = {
        entry.name.removeprefix("optimizer."): Part(entry.box, tensor.detach().cpu().clone())
        for entry, tensor in session.optimizers.parts()
    }
    for other in session.beside:
        step.kept |= {entry.name: Part(entry.box, tensor.detach().cpu().clone()) for entry, tensor in other.parts()}


def ledger(text: str) -> torch.Tensor:
    """16 hex digits as two numbers that float64 holds."""
    return torch.tensor([int(text[:8], 16), int(text[8:], 16)], dtype=torch.float64)
