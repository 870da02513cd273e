"""What a model computes between the places at which a pipeline may cut it, counted on tensors without memory."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept
from allranks.errors import TaskError
from allranks.parallel.precision import Precision
from allranks.profiling.fakes import copy_fake, fake_mode, make_fake, what_failed
from allranks.profiling.recorder import Recorder
from allranks.stepping.start_check import first_samples
from allranks.task import Task, has_step, resolve_inputs


def count_between(
    task: Task, dataset: Any, seed: int, precision: Precision, module: nn.Module, names: Sequence[str]
) -> list[float]:
    """Floating-point operations of a forward of the first samples, by the place at which they run.

    Args:
        dataset: the Task's, whose first samples are loaded.
        module: as the engine has built it; it stays as it is.
        names: of modules in it, in the order of their calls.

    Returns those before the first of `names` is called, then those from each one's call until the next one's.

    Raises:
        TaskError: the forward cannot be traced, or has no operation that is counted.
    """
    if has_step(task):
        raise TaskError(f"{type(task).__name__} has a step() of its own")
    recorder: Recorder | None = None
    try:
        with generators_kept(), unset_fake_temporarily():
            mode, batch = fake_mode(), plain_batch(task.collate(first_samples(dataset, seed)[0]))
            copied = copy_fake(module, mode)
            inputs = resolve_inputs(task, copied, batch)
            recorder = Recorder({"": copied}, {})
            with mode, precision.autocast("cpu"), recorder.recording() as recording:
                arguments: Any = inputs.call(precision.cast_inputs(make_fake(mode, batch)))
                copied(**arguments) if isinstance(arguments, dict) else copied(*arguments)
    except Exception as error:
        # Whatever the user's code raised on fake tensors; where it is a real fault, the first samples show it again.
        raise TaskError(what_failed(error, "" if recorder is None else recorder.running)) from error
    costs, here = [0.0] * (len(names) + 1), 0
    place = {name: number for number, name in enumerate(names, start=1)}
    for call in recording.calls:
        here = max(here, *(place.get(name, 0) for name in call.modules), 0)
        costs[here] += call.flops
    if not any(costs):
        raise TaskError("it has no products of matrices, convolutions or attention")
    return costs
