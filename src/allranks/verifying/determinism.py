"""Does one device compute the same twice? Only then there is something to compare with, and it is asked first.

Two runs that nothing has moved, with other random numbers, have to agree as law 4 has it: bit for bit, or as far as
kernels that add up in another order each time may round. What rounding was seen to do does not widen that: noise moves
those runs, too.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from allranks.verifying.answer import Answer, cannot
from allranks.verifying.assembly import OF_LARGEST, RELATIVE
from allranks.verifying.evidence import Evidence, largest
from allranks.verifying.recording import Noise, OneDevice, Parts, RunRecord, StepRecord
from allranks.verifying.world_view import WorldView

OTHER_SEED = 977
SAME = 1e-9  # relative, of losses, norms and metrics
INSTEAD = (
    "leave the noise out for the time of the comparison; or draw it by torch.randn or rand with one row for each "
    "sample, outside of what is compiled, which verify makes a function of the sample"
)
PARTS = {
    "raw": "the gradient of",
    "gradients": "the gradient of",
    "parameters": "parameter",
    "buffers": "buffer",
    "kept": "what the program keeps as",
}
Again = Callable[[int], RunRecord]


def find_noise(
    first: RunRecord,
    again: Again,
    operations: Callable[[bool], Sequence[str]],
    *,
    relative: float = RELATIVE,
) -> Noise | None:
    """Why one device does not compute the same again; None where it does.

    Args:
        first: of the seeds 0.
        again: the run with other seeds than those of `first`, by a number; with 0 the same run once more.
        operations: told whether the seeds are what matters, the names of what was seen to draw.
    """
    other = first_difference(first, again(OTHER_SEED), relative)
    if not other:
        return None
    same = first_difference(first, again(0), relative)
    return Noise(same or other, not same, tuple(operations(not same)))


def incomparable(one: OneDevice, what: str) -> Answer | None:
    """Why one device has computed nothing to compare with; None where it has. `what`: "the program", "the Task"."""
    if one.noise is not None:
        return _say(one.noise, what)
    if (said := not_finite(one.run)) != "":
        return cannot(f"{what} computes no finite number on one device", said, "make it train alone first")
    return None


def _say(noise: Noise, what: str) -> Answer:
    names = ", ".join(noise.operations)
    if noise.seeded:
        drawn = f"it draws random numbers: {names}" if names else "it draws random numbers"
        runs = "two runs with other seeds differ"
    else:
        drawn = f"no seed reaches what it draws from: {names}" if names else "nothing was seen to draw random numbers"
        runs = "two runs with the same seeds differ"
    return cannot(f"{what} is not deterministic on one device", f"{drawn}\n{runs}: {noise.difference}", INSTEAD)


def first_difference(first: RunRecord, again: RunRecord, relative: float = RELATIVE) -> str:
    """Where two runs of one device part, in words; "" where they do not."""
    return next((said for said in _differences(first, again, relative) if said), "")


def _differences(first: RunRecord, again: RunRecord, relative: float) -> Iterator[str]:
    if again.error:
        yield f"the second one fails: {again.error}"
    for what in ("parameters", "buffers"):
        held: Parts = getattr(again.start, what)
        for name, (_, value) in getattr(first.start, what).items():
            if name not in held or not _equal(value, held[name].value):
                yield f"{PARTS[what]} {name} begins with other values"
    evidence = Evidence(OneDevice(first), [again], WorldView((0,)), relative=relative)
    for index in range(evidence.num_steps):
        yield from (f"step {index}: {said}" for said in _in_step(evidence, index))
    if len(first.steps) != len(again.steps):
        yield f"one makes {len(first.steps)} steps, the other {len(again.steps)}"
    before, now = first.evaluation or {}, again.evaluation or {}
    for name in before:
        if not _near(before[name], now.get(name), relative):
            yield f"evaluation: {name} is {before[name]:.6g} in one and {now.get(name, math.nan):.6g} in the other"


def _in_step(evidence: Evidence, index: int) -> Iterator[str]:
    one, (other,) = evidence.step(index)
    if Counter(one.rows) != Counter(other.rows):
        yield "the samples are others"
    for what, said in PARTS.items():
        expected: Parts = getattr(one, what)
        # What is zero but for rounding may be anything that small.
        least = OF_LARGEST * largest(expected)
        for m in () if _all_equal(expected, getattr(other, what)) else evidence.compare(index, what):
            if m.missing or m.error > least:
                off = "is not there" if m.missing else f"differs by {m.relative:.2g} of its largest value"
                yield f"{said} {m.name} {off}"
    yield from _numbers(one, other, evidence.relative)


def _numbers(one: StepRecord, other: StepRecord, relative: float) -> Iterator[str]:
    if one.updates != other.updates:
        yield f"the optimizer is called {one.updates} and {other.updates} times"
    for mine, due in zip(one.settings, other.settings, strict=False):
        for key, value in mine.items():
            if not _near(value, due.get(key), relative):
                yield f"{key} is {value} in one and {due.get(key)} in the other"
    for name, first, second in (("norm", one.norm, other.norm), ("loss", one.loss, other.loss)):
        if not _near(first, second, relative):
            yield f"the {name} is {first} in one and {second} in the other"


def not_finite(run: RunRecord) -> str:
    """What of a run is no finite number, in words; "" where all of it is. Nothing can be compared with that."""
    for index, step in enumerate(run.steps):
        for what, said in PARTS.items():
            for name, (_, value) in getattr(step, what).items():
                if not bool(torch.isfinite(value).all()):
                    return f"step {index}: {said} {name} is not finite"
        for name, number in (("norm", step.norm), ("loss", step.loss)):
            if number is not None and not math.isfinite(number):
                return f"step {index}: the {name} is {number}"
    return next((f"evaluation: {k} is {v}" for k, v in (run.evaluation or {}).items() if not math.isfinite(v)), "")


def _all_equal(some: Parts, others: Parts) -> bool:
    return some.keys() == others.keys() and all(_equal(p.value, others[n].value) for n, p in some.items())


def _equal(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit; what is not a number is equal to itself."""
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    return torch.equal(value, other) or bool(((value == other) | (value != value) & (other != other)).all())


def _near(value: float | None, other: float | None, relative: float) -> bool:
    if value is None or other is None:
        return value is other
    if not (math.isfinite(value) and math.isfinite(other)):
        return value == other or (math.isnan(value) and math.isnan(other))
    return abs(value - other) <= max(max(SAME, relative) * abs(value), RELATIVE)
