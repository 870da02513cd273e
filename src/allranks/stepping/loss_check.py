"""Is the Task's loss a sum over its targets? Asked once, at the start, of a few samples: whole and as two parts.

Dividing once by the global number of targets (law 3) is right for a sum and wrong for a mean, and nothing later would
show the difference: the run would merely learn badly. So a mean is refused here, with its numbers, whatever it is a
mean over, and a loss that couples the samples of a batch is reported, because such a batch cannot be cut freely.

That is asked in evaluation mode, where little blurs the answer, and then once more in training mode, since a model may
couple its samples there alone. What torch draws is fixed then (fixed_draws.py), and no BatchNorm looks at its batch, so
that a model is judged there that draws random numbers in evaluation mode. Where numbers are drawn all the same, nothing
can be told, and that is said.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept, seed_all
from allranks.errors import AllranksError, TaskError
from allranks.parallel.outputs import in_float32
from allranks.stepping.fixed_draws import FixedDraws
from allranks.stepping.forward_only import REFUSED
from allranks.stepping.kept_state import KeptState, undisturbed
from allranks.stepping.loss_nature import SUM_ADVICE, LossNature, Part, judge, judge_training, without_training
from allranks.stepping.training_mode import as_in_training
from allranks.task import Task
from allranks.task_loading import describe
from allranks.task_world import Alone, rows_of
from allranks.users_code import user_line

NUM_SAMPLES = 5  # cut into 2 and 3: unequal, and no part of one sample, which some models cannot take
FEWEST = 3  # cut into 1 and 2

MOVED = " changes there and is too large to be put back: the run begins with it as these samples have left it"


def num_examined(micro_batch: int) -> int:
    """Samples to examine: fewer where training has one at a time, as there may be no room for the outputs of many."""
    return FEWEST if micro_batch == 1 else NUM_SAMPLES


def examine_loss(
    task: Task,
    module: nn.Module,
    samples: Sequence[Any],
    *,
    inputs: Callable[[Any], Any],
    targets: Callable[[Any], int],
    place: Callable[[Any], Any] = lambda batch: batch,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    compute: torch.dtype | None = None,
    call: Callable[[Any], Any] | None = None,
    collective: bool = False,
) -> LossNature:
    """Find out what `task.loss` is, leaving module, Task, gradients, buffers and generators as they were.

    The module runs in evaluation mode, so that neither dropout nor batch statistics blur the answer, and then in its
    own modes. On each rank it runs equally often, whatever is found: a forward may be collective.

    Args:
        task: with `loss` (a Task with a `step` of its own has nothing to examine).
        module: called as it is, before any wrapper.
        samples: `num_examined` of the dataset, not collated; fewer than three are repeated.
        inputs: the arguments of forward in a batch (`resolve_inputs`).
        targets: the number of targets in a batch (`resolve_targets`).
        place: brings a batch to the module's device.
        autocast: the context of the forward.
        compute: the lower type of that context, or None; the output reaches the loss in float32.
        call: placed batch -> output, in place of the module's own call; it gives None where another rank has it.
        collective: whether other ranks wait in this one's forwards, so that none may leave one out.

    Raises:
        TaskError: the loss is a mean, not a scalar tensor, not finite or without gradient; or a smaller batch fails.
        Exception: the module's own, of training mode: it has no memory, or its forwards are collective.
    """
    assert samples, "an empty dataset is refused before its loss is asked for"
    samples = [samples[index % len(samples)] for index in range(max(FEWEST, len(samples)))]
    cut = (len(samples) - 1) // 2

    def run(some: Sequence[Any], *, finite: bool = True) -> Part | None:
        batch = place(plain_batch(task.collate(list(some))))
        output = _call(module, inputs(batch), autocast) if call is None else call(batch)
        if output is None and call is not None:
            return None
        output = in_float32(output, compute)
        sizes = {"targets": float(targets(batch)), "samples": float(len(some))}
        if isinstance(output, torch.Tensor):
            sizes["elements of the output"] = float(output.numel())
        return Part(_checked(task, module, task.loss(output, batch), sizes, finite=finite), sizes)

    batches, relative = (samples, samples[:cut], samples[cut:]), _relative_tolerance(module, compute)
    with undisturbed(module):
        state = KeptState(module, task)
        nature = _examine_in_evaluation(task, state, run, batches, relative)
    moved = state.moved
    if not task.coupled:
        with generators_kept(module), rows_of(Alone()):
            state = KeptState(module, task)
            nature = _examine_in_training(task, nature, module, state, run, batches, relative, collective=collective)
        moved = moved | state.moved
    return replace(nature, because=f"{nature.because}; {', '.join(sorted(moved))}{MOVED}") if moved else nature


def _examine_in_evaluation(
    task: Task,
    state: KeptState,
    run: Callable[..., Part | None],
    batches: Sequence[Sequence[Any]],
    relative: float,
) -> LossNature:
    """What the samples say, twice, and their two parts: `batches`."""
    samples, *parts = batches

    def run_kept(some: Sequence[Any]) -> Part | None:
        with state.kept():
            return run(some)

    alone = Alone()
    with rows_of(alone):
        whole, again = run_kept(samples), run_kept(samples)
        if task.coupled:
            says = LossNature("coupled", f"{type(task).__name__} says so (coupled = True)", alone.asked)
            return LossNature("elsewhere", "") if whole is None else says
        found = [_run_part(task, run_kept, part, len(samples)) for part in parts]
    return judge(task, [part for part in (whole, again, *found) if part is not None], relative)


def _examine_in_training(
    task: Task,
    nature: LossNature,
    module: nn.Module,
    state: KeptState,
    run: Callable[..., Part | None],
    batches: Sequence[Sequence[Any]],
    relative: float,
    *,
    collective: bool,
) -> LossNature:
    """`nature`, or what is found in training mode of `batches`: the samples, and their two parts."""
    found: list[Part] = []
    lengths: list[set[int]] = []
    # Once more under a second key, and with other choices from tables: it shows whether the loss changes with those.
    for some, key in (*((batch, 0) for batch in batches), (batches[0], 1)):
        seed_all(key)
        draws = FixedDraws(set.intersection(*lengths) if key else ())
        try:
            with as_in_training(module, state, draws):
                part = run(some, finite=False)
        except (AllranksError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if collective or REFUSED in str(error):
                raise
            return without_training(nature, f"it fails there ({type(error).__name__})")
        lengths.append(draws.lengths)
        found += [] if part is None else [part]
    return judge_training(task, nature, found, relative, chooses=bool(set.intersection(*lengths)))


def _call(module: nn.Module, arguments: Any, autocast: Callable[[], AbstractContextManager[object]]) -> Any:
    with autocast():
        return module(**arguments) if isinstance(arguments, dict) else module(*arguments)


def _run_part(
    task: Task, run: Callable[[Sequence[Any]], Part | None], part: Sequence[Any], num_whole: int
) -> Part | None:
    try:
        return run(part)
    except TaskError:
        raise
    except Exception as error:
        what = f"{type(task).__name__} fails on a batch of {len(part)} samples, though {num_whole} work"
        raise TaskError(f"{what}; ranks may hold one sample more or less:\n{user_line(error)}") from error


def _checked(task: Task, module: nn.Module, loss: object, sizes: dict[str, float], *, finite: bool) -> float:
    returned = f"{type(task).__name__}.loss returned {describe(loss)}"
    if not isinstance(loss, torch.Tensor):
        raise TaskError(f"{returned}: return a tensor (no .item(), no float())")
    if loss.ndim or not loss.dtype.is_floating_point:
        raise TaskError(f"{returned}: return one floating-point number, a tensor without dims, e.g. with .sum()")
    if not loss.requires_grad:
        frozen = not any(parameter.requires_grad for parameter in module.parameters())
        why = "no parameter of the model requires one" if frozen else "is something detached, or under no_grad?"
        raise TaskError(f"{returned} without a gradient: {why}")
    value = float(loss.detach())
    if math.isfinite(value) or not finite:
        return value
    found = f"{type(task).__name__}.loss of {sizes['samples']:.0f} samples is {value}"
    if sizes["targets"] == 0:
        raise TaskError(f"{found} as they hold no target: a mean over nothing; {SUM_ADVICE}")
    raise TaskError(f"{found} before the first step")


def _relative_tolerance(module: nn.Module, compute: torch.dtype | None) -> float:
    kinds = {parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point}
    kinds |= {compute} if compute is not None else set()
    return math.sqrt(max(torch.finfo(kind).eps for kind in kinds or {torch.float32}))
