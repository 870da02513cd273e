"""One step of a Task under the recorder: the engine's own passes, or the turns of the Task's own step."""

from dataclasses import dataclass
from time import perf_counter
from typing import Any, final

import numpy as np

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import seed_all
from allranks.data.stream import Order, declared_order
from allranks.errors import AllranksError, TaskError
from allranks.parallel.spread import Spread
from allranks.profiling.fakes import refuse
from allranks.profiling.fitting import Seen
from allranks.profiling.recorder import Recorder
from allranks.profiling.structure import Structure
from allranks.stepping.passes import Forward, PlainPasses
from allranks.stepping.profiled_model import SEED
from allranks.stepping.start_check import first_samples
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.users_code import user_line, users_code

SAMPLES = (2, 3)
"""Two numbers of samples tell what grows with them; one alone is refused by BatchNorm, and squeezed by some models."""


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of so many samples; `num_targets` is 0 where the Task's own step counts them."""

    value: Any
    num_samples: int
    num_targets: int
    is_fake: bool = False


@final
@dataclass(frozen=True, slots=True)
class FirstBatches:
    """Real ones, of each number of samples, of a dataset that is built once for them.

    Attributes:
        order: of the dataset.
        sample_seconds: that loading and collating one sample took, at the fastest.
    """

    batches: tuple[Batch, ...]
    order: Order
    sample_seconds: float


def first_batches(task: Task) -> FirstBatches:
    """Of the training data. Raises DataError where there are none; TaskError where the user's code raises."""
    with users_code(f"{type(task).__name__} fails on the first samples of its dataset"):
        return _load(task)


def _load(task: Task) -> FirstBatches:
    dataset = task.dataset("train")
    found, seconds = first_samples(dataset, SEED)
    batches, collating = [], []
    for number in SAMPLES:
        samples = [found[index % len(found)] for index in range(number)]
        started = perf_counter()
        value = plain_batch(task.collate(samples))
        collating.append((perf_counter() - started) / number)
        batches.append(Batch(value, number, 0 if has_step(task) else resolve_targets(task, value).call(value)))
    return FirstBatches(tuple(batches), declared_order(dataset), seconds + min(collating))


def record(task: Task, spread: Spread, structure: Structure, batch: Batch) -> Seen:
    """One forward and backward of a batch, without an update.

    Raises:
        TaskError: it raised; of a fake batch with the operation, the module and the line that need values.
    """
    recorder = Recorder(structure.modules, structure.parameters, structure.buffers)
    targets, name = batch.num_targets, type(task).__name__
    try:
        with recorder.recording() as recording:
            if has_step(task):
                targets = _own_step(task, spread, batch.value)
            else:
                _plain_step(task, spread, batch)
    except AllranksError:
        raise
    except (Exception, SystemExit) as error:
        if batch.is_fake and isinstance(error, Exception):
            raise refuse(name, recorder.running, error) from error
        raise TaskError(f"{name}'s step raised:\n{user_line(error)}") from error
    _drop_gradients(spread)
    return Seen(batch.num_samples, targets, recording)


def _plain_step(task: Task, spread: Spread, batch: Batch) -> None:
    """The engine's own pass over one micro-step."""
    inputs = resolve_inputs(task, spread.modules[""], batch.value)
    numbers = np.arange(batch.num_samples, dtype=np.int64)
    micro_step = MicroStep(batch.value, 1, None, SEED, numbers, numbers)
    step = StepBatch(0, 0, batch.num_samples, (micro_step,))
    for _ in PlainPasses(Forward(task, spread, inputs.call)).run(step, 1.0):
        pass


def _own_step(task: Task, spread: Spread, value: Any) -> int:
    """The turns of a Task's own step, as AlternatingPasses takes them; the targets of the first."""
    forward = Forward(task, spread, lambda given: (given,))
    seed_all(SEED)
    turns, counted = iter(task.step(spread.modules.get("", spread.modules), forward.place(value))), 0
    while True:
        with forward.autocast():
            yielded = next(turns, None)
        if yielded is None:
            return counted
        _, loss, targets = yielded
        counted = counted or int(targets)
        loss.backward()
        _drop_gradients(spread)


def _drop_gradients(spread: Spread) -> None:
    for parameter in spread.trainable().values():
        parameter.grad = None
