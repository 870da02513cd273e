"""Any Task's ModelProfile: its own step, run by the engine's own passes on tensors without memory, and recorded.

`trace_task` and `trace_module` run on fake tensors, `trace_measured` on real ones; the recorder is the same.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import nn

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.data.random_keys import seed_all
from allranks.errors import AllranksError, LayoutError, TaskError
from allranks.layout import Layout
from allranks.model_profile import ModelProfile
from allranks.parallel.batchnorm import uses_batch_statistics
from allranks.parallel.blocks import find_blocks
from allranks.parallel.expert import is_experts
from allranks.parallel.initial import Source
from allranks.parallel.mesh import build_mesh
from allranks.parallel.parallelize import parallelize
from allranks.parallel.precision import choose_precision
from allranks.parallel.spread import Spread
from allranks.parallel.tensor_plan import plan_tensor
from allranks.profiling.fakes import build_fake, fake_mode, make_fake, refuse
from allranks.profiling.fitting import Seen, build_profile
from allranks.profiling.recorder import Recorder
from allranks.profiling.structure import Structure
from allranks.stepping.passes import Forward, PlainPasses
from allranks.stepping.start_check import first_samples
from allranks.task import Task, has_step, resolve_inputs, resolve_targets
from allranks.task_loading import user_line
from allranks.verdict import Decision

SINGLE = Layout(kind="single")
SAMPLES = (2, 3)
"""Two numbers of samples tell what grows with them; one alone is refused by BatchNorm, and squeezed by some models."""
SEED = 0


def trace_task(
    task: Task, precision: str = "bfloat16", tell: Callable[[Decision], None] = lambda decision: None
) -> ModelProfile:
    """What one sample of `task` costs, without memory and without the device.

    Args:
        precision: as `train.precision`.
        tell: is told what was decided on the way.

    Raises:
        TaskError: the model cannot be traced (the operation, module and line are named), or breaks its contract.
    """
    name, mode = type(task).__name__, fake_mode()
    with _generators_kept():
        batches = _batches(task)
        seed_all(SEED)
        try:
            model, decisions = build_fake(task.model, mode)
        except Exception as error:
            raise TaskError(f"{name}.model() raised:\n{user_line(error)}") from error
        for decision in decisions:
            tell(decision)
        with mode:
            spread = _spread(task, lambda: model, precision)
            structure = describe(task, spread)
            fakes = [replace(batch, value=make_fake(mode, batch.value), is_fake=True) for batch in batches]
            seen = [_record(task, spread, structure, batch) for batch in fakes]
    return build_profile(structure, seen, precision=precision, source="traced")


def trace_measured(task: Task, precision: str = "bfloat16", device: str = "cpu") -> ModelProfile:
    """The same from real steps on `device`, for models that a trace cannot follow.

    The model, its gradients and the activations of a few samples must fit there.

    Raises:
        TaskError: the step raised (the user's line is shown), or breaks its contract.
    """
    with _generators_kept():
        batches = _batches(task)
        spread = _spread(task, task.model, precision, device)
        structure = describe(task, spread)
        seen = [_record(task, spread, structure, batch) for batch in batches]
    return build_profile(structure, seen, precision=precision, source="measured")


def trace_module(
    make: Callable[[], nn.Module],
    samples: Sequence[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    precision: str = "bfloat16",
) -> ModelProfile:
    """`trace_task` for a module without a Task.

    Args:
        make: builds the module.
        samples: a few, as torch's default collate takes them: (input, target), or dicts that name forward's arguments.
        loss: (output, batch) -> the sum over the batch's targets.
    """
    return trace_task(_Bare(make, samples, loss), precision)


class _Bare(Task):
    """A module, samples and a loss."""

    def __init__(self, make: Callable[[], nn.Module], samples: Any, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self._make, self._samples, self._loss = make, samples, loss

    def model(self) -> nn.Module:
        return self._make()

    def dataset(self, split: str) -> Any:
        return self._samples

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return self._loss(output, batch)


@final
@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of so many samples; `targets` are 0 where the Task's own step counts them."""

    value: Any
    num_samples: int
    num_targets: int
    is_fake: bool = False


def _batches(task: Task) -> list[_Batch]:
    """Real ones, of each number of samples."""
    found, _ = first_samples(task.dataset("train"), SEED)
    batches = []
    for number in SAMPLES:
        value = task.collate([found[index % len(found)] for index in range(number)])
        batches.append(_Batch(value, number, 0 if has_step(task) else resolve_targets(task, value).call(value)))
    return batches


@contextmanager
def _generators_kept() -> Iterator[None]:
    """What is drawn in a trace is no draw of the caller's."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(plain)
    np.random.set_state(arrays)


def _record(task: Task, spread: Spread, structure: Structure, batch: _Batch) -> Seen:
    """One step of a batch."""
    recorder = Recorder(structure.modules, structure.parameters, structure.buffers)
    targets = batch.num_targets
    try:
        with recorder.recording() as recording:
            if has_step(task):
                targets = _own_step(task, spread, batch.value)
            else:
                _plain_step(task, spread, batch.value, batch.num_samples)
    except AllranksError:
        raise
    except Exception as error:
        if batch.is_fake:
            raise refuse(type(task).__name__, recorder.running, error) from error
        raise TaskError(f"{type(task).__name__}'s step raised:\n{user_line(error)}") from error
    for parameter in spread.trainable().values():
        parameter.grad = None
    return Seen(batch.num_samples, targets, recording)


def _plain_step(task: Task, spread: Spread, batch: Any, number: int) -> None:
    """The engine's own pass over one micro-step."""
    inputs = resolve_inputs(task, spread.modules[""], batch)
    numbers = np.arange(number, dtype=np.int64)
    micro_step = MicroStep(batch, 1, None, SEED, numbers, numbers)
    for _ in PlainPasses(Forward(task, spread, inputs.call)).run(StepBatch(0, 0, number, (micro_step,)), 1.0):
        pass


def _own_step(task: Task, spread: Spread, batch: Any) -> int:
    """The turns of a Task's own step, as AlternatingPasses takes them; the targets of the first."""
    forward = Forward(task, spread, lambda given: (given,))
    seed_all(SEED)
    turns, counted = iter(task.step(spread.modules.get("", spread.modules), forward.place(batch))), 0
    while True:
        with forward.autocast():
            yielded = next(turns, None)
        if yielded is None:
            return counted
        _, loss, targets = yielded
        counted = counted or int(targets)
        loss.backward()
        for parameter in spread.trainable().values():
            parameter.grad = None


def _spread(task: Task, build: Callable[[], Any], precision: str, device: str = "cpu") -> Spread:
    hints = task.hints()
    return parallelize(
        build,
        build_mesh(SINGLE, device),
        choose_precision(precision, None, device),
        torch.device(device),
        source=Source(),
        seed=partial(seed_all, SEED),
        blocks=hints.blocks,
        tensor=hints.tensor,
        batchnorm=hints.batchnorm,
        optional=hints.optional,
        training=True,
    )


def describe(task: Task, spread: Spread) -> Structure:
    """What the engine knows of a Task's model: its blocks, its tensor parallel plan, who shares what with whom."""
    hints = task.hints()
    named = [(name, m) for which, module in spread.modules.items() for name, m in module.named_modules(prefix=which)]
    found = find_blocks(spread.modules, hints.blocks)
    blocks = tuple(f"{which}.{name}" if which else name for which, names in found.items() for name in names)
    try:
        styles: Mapping[str, Any] = plan_tensor(spread.modules, hints.tensor, 1).styles
    except LayoutError:
        styles = {}
    entries = [entry for _, entry in spread.map.items()]
    return Structure(
        name=type(task).__name__,
        modules=spread.modules,
        parameters={e.name: spread.tensors[e.name] for e in entries if e.kind == "parameter"},
        blocks=blocks,
        styles=styles,
        experts={name: int(m.num_experts) for name, m in named if is_experts(m)},
        stateful=tuple(name for name, m in named if uses_batch_statistics(m)),
        tied=tuple((e.name, e.alias_of) for e in entries if e.alias_of is not None and e.kind == "parameter"),
        coupled=task.coupled,
        buffers=tuple(spread.tensors[e.name] for e in entries if e.kind == "buffer"),
    )
