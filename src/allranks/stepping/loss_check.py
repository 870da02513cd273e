"""Is the Task's loss a sum over its targets? Asked once, at the start, of a few samples: whole and as two parts.

Dividing once by the global number of targets (law 3) is right for a sum and wrong for a mean, and nothing later would
show the difference: the run would merely learn badly. So a mean is refused here, with its numbers, whatever it is a
mean over, and a loss that couples the samples of a batch is reported, because such a batch cannot be cut freely.

That is asked in evaluation mode, where little blurs the answer, and then once more in training mode, since a model may
couple its samples there alone. Only a coupling is looked for then: what torch draws is fixed (fixed_draws.py), and no
BatchNorm looks at its batch. Where numbers are drawn all the same, nothing can be told, and that is said.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from allranks.data.random_keys import generators_kept, seed_all
from allranks.errors import AllranksError, TaskError
from allranks.parallel.outputs import in_float32
from allranks.stepping.fixed_draws import FixedDraws
from allranks.stepping.forward_only import REFUSED
from allranks.stepping.kept_state import KeptState, undisturbed
from allranks.stepping.training_mode import as_in_training
from allranks.task import Task
from allranks.task_loading import describe
from allranks.task_world import Alone, rows_of
from allranks.users_code import user_line

NUM_SAMPLES = 5  # cut into 2 and 3: unequal, and no part of one sample, which some models cannot take
FEWEST = 3  # cut into 1 and 2

MOVED = " changes there and is too large to be put back: the run begins with it as these samples have left it"
SUM_ADVICE = "return the SUM over targets, e.g. reduction='sum' (allranks divides once, by the global number)"


@dataclass(frozen=True, slots=True)
class LossNature:
    """What the loss of a Task was found to be: "sum" (a batch may be cut anywhere) or "coupled" (it may not).

    "elsewhere": the last stage of the pipeline has found it, and this rank does not run that. `gathers`: it asks for
    the rows of the other ranks.
    """

    kind: Literal["sum", "coupled", "elsewhere"]
    because: str
    gathers: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    """The loss of some samples, and the sizes by which a mean may have been weighted."""

    loss: float
    sizes: dict[str, float]


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

    def run(some: Sequence[Any], *, finite: bool = True) -> _Part | None:
        batch = place(task.collate(list(some)))
        output = _call(module, inputs(batch), autocast) if call is None else call(batch)
        if output is None and call is not None:
            return None
        output = in_float32(output, compute)
        sizes = {"targets": float(targets(batch)), "samples": float(len(some))}
        if isinstance(output, torch.Tensor):
            sizes["elements of the output"] = float(output.numel())
        return _Part(_checked(task, module, task.loss(output, batch), sizes, finite=finite), sizes)

    batches, relative = (samples, samples[:cut], samples[cut:]), _relative_tolerance(module, compute)
    with undisturbed(module):
        state = KeptState(module, task)
        nature = _examine_in_evaluation(task, state, run, batches, relative)
    moved = state.moved
    if not task.coupled:
        with generators_kept(module), rows_of(Alone()):
            state = KeptState(module, task)
            nature = _examine_in_training(nature, module, state, run, batches, relative, collective=collective)
        moved = moved | state.moved
    return replace(nature, because=f"{nature.because}; {', '.join(sorted(moved))}{MOVED}") if moved else nature


def _examine_in_evaluation(
    task: Task,
    state: KeptState,
    run: Callable[..., _Part | None],
    batches: Sequence[Sequence[Any]],
    relative: float,
) -> LossNature:
    """What the samples say, twice, and their two parts: `batches`."""
    samples, *parts = batches

    def run_kept(some: Sequence[Any]) -> _Part | None:
        with state.kept():
            return run(some)

    alone = Alone()
    with rows_of(alone):
        whole, again = run_kept(samples), run_kept(samples)
        if task.coupled:
            says = LossNature("coupled", f"{type(task).__name__} says so (coupled = True)", alone.asked)
            return LossNature("elsewhere", "") if whole is None else says
        found = [_run_part(task, run_kept, part, len(samples)) for part in parts]
    return _judge(task, [part for part in (whole, again, *found) if part is not None], relative)


def _examine_in_training(
    nature: LossNature,
    module: nn.Module,
    state: KeptState,
    run: Callable[..., _Part | None],
    batches: Sequence[Sequence[Any]],
    relative: float,
    *,
    collective: bool,
) -> LossNature:
    """`nature`, or what is found in training mode of `batches`: the samples, and their two parts."""
    found: list[_Part] = []
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
            return _without_training(nature, f"it fails there ({type(error).__name__})")
        lengths.append(draws.lengths)
        found += [] if part is None else [part]
    return _judge_training(nature, found, relative, chooses=bool(set.intersection(*lengths)))


def _call(module: nn.Module, arguments: Any, autocast: Callable[[], AbstractContextManager[object]]) -> Any:
    with autocast():
        return module(**arguments) if isinstance(arguments, dict) else module(*arguments)


def _judge(task: Task, found: Sequence[_Part], relative: float) -> LossNature:
    """`found`: a batch twice and its two parts; nothing on a rank that has no output."""
    if not found:
        return LossNature("elsewhere", "")
    whole, again, *parts = found
    first, second = parts
    noise = abs(whole.loss - again.loss)
    numbers = _numbers((whole, first, second))
    tolerance = relative * (abs(whole.loss) + abs(first.loss) + abs(second.loss)) + 8 * noise
    is_sum = abs(whole.loss - (first.loss + second.loss)) <= tolerance
    mean_over = [size for size in whole.sizes if abs(whole.loss - _mean(parts, size)) <= tolerance]
    if is_sum and mean_over:
        why = "the model draws random numbers in evaluation mode" if noise else "some of these samples add nothing"
        return LossNature("sum", f"it could not be told from a mean, as {why} ({numbers})")
    if is_sum:
        return LossNature("sum", f"the parts of a batch add up to the whole ({numbers})")
    if mean_over:
        raise TaskError(f"{type(task).__name__}.loss returns a mean over {mean_over[0]} ({numbers}): {SUM_ADVICE}")
    if _lies_between(whole, parts, tolerance):
        what = f"{type(task).__name__}.loss returns a mean, as the whole lies between its parts ({numbers})"
        raise TaskError(f"{what}: {SUM_ADVICE}; if it is no mean, set coupled = True")
    return LossNature("coupled", _describe_coupling((whole, first, second)))


def _judge_training(nature: LossNature, found: Sequence[_Part], relative: float, *, chooses: bool) -> LossNature:
    """Of a batch, its parts, and the batch with other draws; nothing is found on a rank that has no output.

    `chooses`: from a table that is as long for a part as for the batch. Of such a table a batch takes other places than
    its parts, so that these prove nothing where the loss depends on which.
    """
    if nature.kind != "sum" or not found:
        return nature
    whole, first, second, again = (part.loss for part in found)
    if not all(map(math.isfinite, (whole, again, first, second))):
        return _without_training(nature, "the loss of so few samples is not finite there")
    noise = abs(whole - again)
    drawn = noise > relative * (abs(whole) + abs(again))
    tolerance = relative * (abs(whole) + abs(first) + abs(second)) + (0.0 if drawn else 8 * noise)
    adds_up = abs(whole - (first + second)) <= tolerance
    if drawn and not chooses:
        return _without_training(nature, "random numbers are drawn there by other means than torch's functions")
    if adds_up:
        return nature
    if drawn:
        return _without_training(nature, "the loss depends on what is chosen there, by a permutation or by weights")
    return LossNature("coupled", f"in training mode {_describe_coupling(found[:3])}")


def _without_training(nature: LossNature, why: str) -> LossNature:
    if nature.kind != "sum":
        return nature
    return replace(nature, because=f"{nature.because}; of training mode it is not known, as {why}")


def _numbers(found: Sequence[_Part]) -> str:
    return ", ".join(f"{part.loss:.6g} for {part.sizes['samples']:.0f} samples" for part in found)


def _describe_coupling(found: Sequence[_Part]) -> str:
    cause = "its samples are coupled, or something is added to every batch, such as a penalty on the weights"
    return f"the parts of a batch do not add up to the whole ({_numbers(found)}): {cause}"


def _lies_between(whole: _Part, parts: Sequence[_Part], tolerance: float) -> bool:
    """Whether it is a mean by weights that are not known here, such as the labels left after a shift.

    A sum of losses of one sign lies beyond both of its parts, coupled or not, and the largest loss is one of them.
    """
    low, high = sorted(part.loss for part in parts)
    return low * high > 0 and low + tolerance < whole.loss < high - tolerance


def _mean(parts: Sequence[_Part], size: str) -> float:
    total = sum(part.sizes.get(size, 0.0) for part in parts)
    # a part without targets has no mean (0/0), and no say in the mean of the whole
    return sum(part.loss * part.sizes[size] for part in parts if part.sizes.get(size)) / total if total else math.inf


def _run_part(
    task: Task, run: Callable[[Sequence[Any]], _Part | None], part: Sequence[Any], num_whole: int
) -> _Part | None:
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
