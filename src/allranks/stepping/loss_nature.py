"""What the loss of a batch and those of its two parts say: a sum, a mean, or a coupling of its samples.

In evaluation mode a model may draw random numbers, which blur the answer. In training mode what torch draws is fixed,
so that the answer there is exact: it decides what evaluation mode could not tell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from allranks.errors import TaskError
from allranks.task import Task

SUM_ADVICE = "return the SUM over targets, e.g. reduction='sum' (allranks divides once, by the global number)"


@dataclass(frozen=True, slots=True)
class LossNature:
    """What the loss of a Task was found to be: "sum" (a batch may be cut anywhere) or "coupled" (it may not).

    "elsewhere": the last stage of the pipeline has found it, and this rank does not run that. `gathers`: it asks for
    the rows of the other ranks. `settled`: False where evaluation mode could not tell, as numbers are drawn there or
    some samples add nothing.
    """

    kind: Literal["sum", "coupled", "elsewhere"]
    because: str
    gathers: bool = False
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """The loss of some samples, and the sizes by which a mean may have been weighted."""

    loss: float
    sizes: dict[str, float]


def judge(task: Task, found: Sequence[Part], relative: float) -> LossNature:
    """Of a batch twice and its two parts, in evaluation mode; nothing is found on a rank that has no output.

    TaskError where it is a mean.
    """
    if not found:
        return LossNature("elsewhere", "")
    whole, again, first, second = found
    noise = abs(whole.loss - again.loss)
    draws = noise > relative * (abs(whole.loss) + abs(again.loss))
    found = (whole, first, second)
    tolerance = relative * sum(abs(part.loss) for part in found) + 8 * noise
    if abs(whole.loss - (first.loss + second.loss)) > tolerance:
        _refuse_mean(task, found, tolerance)
        return LossNature("coupled", _describe_coupling(found), settled=not draws)
    if _mean_over(found, tolerance):
        why = "the model draws random numbers in evaluation mode" if noise else "some of these samples add nothing"
        undecided = f"it could not be told from a mean, as {why} ({_numbers(found)})"
        return LossNature("sum", undecided, settled=False)
    return LossNature("sum", f"the parts of a batch add up to the whole ({_numbers(found)})", settled=not draws)


def judge_training(
    task: Task, nature: LossNature, found: Sequence[Part], relative: float, *, chooses: bool
) -> LossNature:
    """Of a batch, its parts, and the batch with other draws; nothing is found on a rank that has no output.

    TaskError where evaluation mode has not settled it, and it is a mean.

    Args:
        nature: as `judge` found it.
        chooses: from a table that is as long for a part as for the batch. Of such a table a batch takes other places
            than its parts, so that these prove nothing where the loss depends on which.
    """
    if (nature.kind != "sum" and nature.settled) or not found:
        return nature
    whole, first, second, again = (part.loss for part in found)
    if not all(map(math.isfinite, (whole, again, first, second))):
        return without_training(nature, "the loss of so few samples is not finite there")
    noise = abs(whole - again)
    drawn = noise > relative * (abs(whole) + abs(again))
    tolerance = relative * (abs(whole) + abs(first) + abs(second)) + (0.0 if drawn else 8 * noise)
    adds_up = abs(whole - (first + second)) <= tolerance
    if drawn and not chooses:
        return without_training(nature, "random numbers are drawn there by other means than torch's functions")
    if drawn and not adds_up:
        return without_training(nature, "the loss depends on what is chosen there, by a permutation or by weights")
    told = found[:3]
    if not adds_up:
        if not nature.settled:
            _refuse_mean(task, told, tolerance)
        return LossNature("coupled", f"in training mode {_describe_coupling(told)}")
    if nature.settled or drawn or _mean_over(told, tolerance):
        return nature
    where = "in training mode, where what is drawn is fixed"
    return LossNature("sum", f"the parts of a batch add up to the whole {where} ({_numbers(told)})")


def without_training(nature: LossNature, why: str) -> LossNature:
    """`nature`, and why it is not known whether samples are coupled in training mode, where that is the question."""
    if nature.kind != "sum":
        return nature
    return replace(nature, because=f"{nature.because}; of training mode it is not known, as {why}")


def _refuse_mean(task: Task, found: Sequence[Part], tolerance: float) -> None:
    """`found`: a batch and its two parts, which do not add up to it. Raises TaskError where it is their mean."""
    whole, *parts = found
    what = f"{type(task).__name__}.loss returns a mean"
    over = _mean_over(found, tolerance)
    if over is not None:
        raise TaskError(f"{what} over {over} ({_numbers(found)}): {SUM_ADVICE}")
    if _lies_between(whole, parts, tolerance):
        between = f"{what}, as the whole lies between its parts ({_numbers(found)})"
        raise TaskError(f"{between}: {SUM_ADVICE}; if it is no mean, set coupled = True")


def _mean_over(found: Sequence[Part], tolerance: float) -> str | None:
    """The size by which the loss of a batch is the mean of those of its parts; None where there is none."""
    whole, *parts = found
    return next((size for size in whole.sizes if abs(whole.loss - _mean(parts, size)) <= tolerance), None)


def _numbers(found: Sequence[Part]) -> str:
    return ", ".join(f"{part.loss:.6g} for {part.sizes['samples']:.0f} samples" for part in found)


def _describe_coupling(found: Sequence[Part]) -> str:
    cause = "its samples are coupled, or something is added to every batch, such as a penalty on the weights"
    return f"the parts of a batch do not add up to the whole ({_numbers(found)}): {cause}"


def _lies_between(whole: Part, parts: Sequence[Part], tolerance: float) -> bool:
    """Whether it is a mean by weights that are not known here, such as the labels left after a shift.

    A sum of losses of one sign lies beyond both of its parts, coupled or not, and the largest loss is one of them.
    """
    low, high = sorted(part.loss for part in parts)
    return low * high > 0 and low + tolerance < whole.loss < high - tolerance


def _mean(parts: Sequence[Part], size: str) -> float:
    total = sum(part.sizes.get(size, 0.0) for part in parts)
    # a part without targets has no mean (0/0), and no say in the mean of the whole
    return sum(part.loss * part.sizes[size] for part in parts if part.sizes.get(size)) / total if total else math.inf
