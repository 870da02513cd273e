"""Any Task's ModelProfile: its own step, run by the engine's own passes on tensors without memory, and recorded.

`trace_task` and `trace_module` run on fake tensors, `trace_measured` on real ones; the recorder is the same.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from allranks.data.random_keys import generators_kept, seed_all
from allranks.model_profile import ModelProfile
from allranks.parallel.precision import choose_precision
from allranks.parallel.spread import Spread
from allranks.profiling.cache import ProfileCache, have_sources, key_of
from allranks.profiling.fakes import build_fake, fake_mode, make_fake
from allranks.profiling.fitting import build_profile
from allranks.profiling.on_cuda import as_on_cuda
from allranks.stepping.gathered_weights import record_gathered
from allranks.stepping.profiled_model import SEED, describe, identity, spread_alone
from allranks.stepping.profiled_step import Batch, FirstBatches, first_batches, record
from allranks.task import Task
from allranks.users_code import users_code
from allranks.verdict import Decision

Tell = Callable[[Decision], None]


def trace_task(
    task: Task,
    precision: str = "bfloat16",
    device: str = "cpu",
    *,
    loaded: FirstBatches | None = None,
    cache: ProfileCache | None = None,
    tell: Tell = lambda decision: None,
) -> ModelProfile:
    """What one sample of `task` costs, without memory and without the device.

    Args:
        precision: as `train.precision`.
        device: "cpu", or "cuda" for what a GPU's kernels would keep and move (profiling/on_cuda.py); none is needed.
        loaded: of this task, where they are there already: its dataset is not built again.
        cache: where a profile of this very model may be, and is kept. What a forward depends on besides its code,
            the Task's settings and the model's and batch's structure (environment variables, say) is not looked at.
        tell: is told what was decided on the way.

    Raises:
        TaskError: the model cannot be traced (the operation, module and line are named), or breaks its contract.
    """
    mode = fake_mode()
    with generators_kept():
        batches = (loaded or first_batches(task)).batches
        seed_all(SEED)
        with users_code(f"{type(task).__name__}.model() raised"):
            model, decisions = build_fake(task.model, mode)
        for decision in decisions:
            tell(decision)
        with as_on_cuda() if device == "cuda" else nullcontext(), mode:
            spread = spread_alone(task, lambda: model, precision, "cpu")
            fakes = [replace(batch, value=make_fake(mode, batch.value), is_fake=True) for batch in batches]
            return _profile(task, spread, fakes, (precision, device, "traced"), cache, tell)


def trace_measured(
    task: Task,
    precision: str = "bfloat16",
    device: str = "cpu",
    *,
    loaded: FirstBatches | None = None,
    cache: ProfileCache | None = None,
    tell: Tell = lambda decision: None,
) -> ModelProfile:
    """The same from real steps on `device` ("cpu", "cuda"), for models that a trace cannot follow.

    The model, its gradients and the activations of a few samples must fit there.

    Raises:
        TaskError: the step raised (the user's line is shown), or breaks its contract.
    """
    with generators_kept():
        batches = (loaded or first_batches(task)).batches
        spread = spread_alone(task, lambda: _built(task), precision, device)
        return _profile(task, spread, batches, (precision, device, "measured"), cache, tell)


def _built(task: Task) -> Any:
    with users_code(f"{type(task).__name__}.model() raised"):
        return task.model()


def load_first(task: Task) -> FirstBatches:
    """What `trace_task` traces, for several of them, and for who asks how fast samples are loaded here."""
    with generators_kept():
        return first_batches(task)


def trace_module(
    make: Callable[[], nn.Module],
    samples: Sequence[Any],
    loss: Callable[[Any, Any], torch.Tensor],
    precision: str = "bfloat16",
    device: str = "cpu",
) -> ModelProfile:
    """`trace_task` for a module without a Task.

    Args:
        make: builds the module.
        samples: a few, as torch's default collate takes them: (input, target), or dicts that name forward's arguments.
        loss: (output, batch) -> the sum over the batch's targets.
    """
    return trace_task(_Bare(make, samples, loss), precision, device)


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


def _profile(
    task: Task,
    spread: Spread,
    batches: Sequence[Batch],
    how: tuple[str, str, Literal["traced", "measured"]],
    cache: ProfileCache | None,
    tell: Tell,
) -> ModelProfile:
    """From the cache, or from a step of each batch."""
    precision, device, source = how
    structure, key = describe(task, spread), ""
    if cache is not None:
        known = identity(task, structure, [(batch.value, batch.num_targets) for batch in batches])
        key = key_of({**known, "precision": precision, "source": source, "device": device})
        found = cache.find(key)
        if found is not None:
            return found
    seen = [record(task, spread, structure, batch) for batch in batches]
    chosen = choose_precision(precision, None, device)
    gathered = None
    if chosen.gather is not chosen.parameters:
        gathered = record_gathered(task, spread, structure, batches[-1], chosen.gather)
    profile = build_profile(structure, seen, gathered, precision=precision, source=source)
    if cache is not None:
        classes = {type(task), *(type(module) for _, module in structure.members())}
        failed = cache.keep(key, profile) if have_sources(classes) else "part of its code is in no file"
        if failed:
            tell(Decision("the model's profile is not kept for the next time", failed))
    return profile
