"""A Task's model in outline: how many parameters, and a key for what was learned of it. Its dataset is not built."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch

from allranks.errors import TaskError
from allranks.model_profile import ModelProfile
from allranks.profiling.cache import ProfileCache, have_sources, key_of, plain_attributes
from allranks.profiling.known_tasks import KnownTask, find_known, keep_known
from allranks.request import TrainRequest
from allranks.training.counted_parameters import build_unfilled, count_in
from allranks.training.prepare import Prepared, prepare
from allranks.verdict import Decision

if TYPE_CHECKING:
    from allranks.stepping.profiled_step import FirstBatches


@final
@dataclass(frozen=True, slots=True)
class Sketch:
    """What building the model in outline says.

    Attributes:
        parameters: of all models of the Task, shared ones once; trained: of them, those that get gradients.
        key: of everything that a profile depends on but the code and the shapes of the data; "" where some of the
            code is in no file, so that nobody would see it change.
    """

    parameters: int
    trained: int
    key: str


def sketch_of(prepared: Prepared, device: str) -> Sketch:
    """In outline what would train on `device` ("cpu", "cuda"): model() runs once more, and takes next to nothing."""
    task, models = prepared.task, build_unfilled(prepared.task)
    hints = task.hints()
    described = {
        "torch": torch.__version__,
        "device": device,
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "spec": prepared.spec,
        "settings": task.settings,
        "attributes": plain_attributes(vars(task)),
        "data": prepared.config.data.model_dump(mode="json"),
        "hints": [list(hints.blocks), dict(hints.tensor), hints.batchnorm, list(hints.optional), hints.loss_parallel],
        "modules": [
            [(name, type(part).__qualname__, plain_attributes(vars(part))) for name, part in model.named_modules()]
            for model in models
        ],
        "parameters": [
            [(str(tensor.dtype), list(tensor.shape), tensor.requires_grad) for tensor in model.parameters()]
            for model in models
        ],
        "buffers": [[(str(tensor.dtype), list(tensor.shape)) for tensor in model.buffers()] for model in models],
    }
    classes = {type(task), *(type(part) for model in models for part in model.modules())}
    key = key_of(described) if have_sources(classes) else ""
    return Sketch(count_in(models), count_in(models, trained=True), key)


def trace_known(
    prepared: Prepared,
    precisions: Sequence[str],
    device: str,
    sketch: Sketch | None,
    tell: Callable[[Decision], None],
    *,
    within: float | None = None,
) -> KnownTask:
    """Trace the Task's model, and keep what is known then for the next start where `sketch` has a key for it.

    Args:
        within: seconds for the trace, from when the dataset has been built; in a process's first thread.

    Raises:
        TaskError: it cannot be traced, or not within that time, which is kept too.
    """
    from allranks.stepping.profile import load_first, trace_task

    key, loaded = "" if sketch is None else sketch.key, load_first(prepared.task)
    try:
        with _ended_after(within):
            profiles = {
                name: trace_task(prepared.task, name, device, loaded=loaded, cache=ProfileCache(), tell=tell)
                for name in precisions
            }
    except (TaskError, TimeoutError) as error:
        keep_known(key, {}, fault=str(error))
        raise TaskError(str(error)) from error
    return keep_known(key, profiles, loaded.order, loaded.sample_seconds)


def replace_fault(
    request: TrainRequest, precision: str, device: str, profile: ModelProfile, loaded: "FirstBatches"
) -> None:
    """Keep what a trace has found for the next start, where one before it has failed or took too long.

    The outline is drawn of a task that has not been traced: one may remember how often it was.
    """
    with suppress(Exception):  # the user's code runs once more; what was found does not depend on it
        key = sketch_of(prepare(request), device).key
        known = find_known(key)
        if known is not None and precision not in known.profiles:
            keep_known(key, {**known.profiles, precision: profile}, loaded.order, loaded.sample_seconds)


@contextmanager
def _ended_after(seconds: float | None) -> Iterator[None]:
    """TimeoutError inside after so many seconds, as soon as Python's next line is reached."""

    def end(*_: object) -> None:
        raise TimeoutError(f"its trace took longer than {seconds:g} s; `allranks plan` waits for it")

    if seconds is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
