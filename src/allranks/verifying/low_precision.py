"""Gradients of a run in a low precision: how far off is decided by what rounding in that precision was seen to do.

Two numbers for each tensor: the relative error (in the 2-norm), and the factor by which it is too large, which is known
much better, since rounding averages out in it. The factor is one to the mean of all runs of one device, and may be as
far from 1 as a few standard deviations of theirs: of this tensor and, since a few runs may be alike by chance, of all.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final, final

import torch

from allranks.verifying.assembly import Mismatch, copies_of
from allranks.verifying.evidence import Evidence, few
from allranks.verifying.findings import Finding
from allranks.verifying.gradient_causes import explain_gradients
from allranks.verifying.recording import OneDevice, Parts

TIMES_ERROR: Final = 4.0  # of the largest error of a variant
TIMES_FACTOR: Final = 8.0  # of the largest deviation of a variant's factor, of an own loop
TIMES_NOISE: Final = 6.0  # of the standard deviation of a run's factor; at 5 a clean run of tp=8 was accused
POOLED_RUNS: Final = 3  # as many runs of a tensor's own do all tensors together count for
MOST_POOLED: Final = 9.0  # of the median: a gradient of nothing but rounding has no factor, and says none of others
LEAST_FACTOR: Final = 0.004  # half an ulp of bfloat16: a factor nearer to 1 than that is not seen
LEAST_ERROR: Final = 0.008
SAME_COPY: Final = LEAST_ERROR  # relative, in the 2-norm: as far copies of a gradient may be apart that ranks add up
MOST_ERROR: Final = 0.4  # however far rounding goes: half of a gradient, or twice as much, is off by more
MOST_NOISE: Final = 0.2  # of the 2-norm; what rounding alone moves by more than that says little, and is told
NOISY = "rounding in {} alone moves these gradients by more than a fifth, so that a factor is not seen in them: {}"


EQUAL = "gradients of the first step in {}: equal to {:.2g}% of each tensor in the 2-norm, and to {:.2g}% in its factor"


def judge_low_precision(evidence: Evidence) -> list[Finding]:
    """Findings on the gradients of the first step, from the same parameters and samples; before clipping, if it is."""
    (first, raw), (second, rest) = _before_clipping(evidence)
    return _judge_some(evidence, first, raw) or _judge_some(evidence, second, rest)


def _before_clipping(evidence: Evidence) -> tuple[tuple[str, Collection[str]], tuple[str, Collection[str]]]:
    """(what, names) of gradients that are compared before clipping, and of the others."""
    one, ranks = evidence.step(0)
    # Some of the parameters may be clipped, and by whatever the ranks clip.
    raw = set(one.raw) if all(record.raw for record in ranks) else set()
    return ("raw", raw), ("gradients", set(one.gradients) - raw)


def _judge_some(evidence: Evidence, what: str, names: Collection[str]) -> list[Finding]:
    expected, variants, held = _sides(evidence, what)
    allowed = _factors(evidence, what, names)
    off = [m for n, factor in allowed.items() if (m := compare_noisy(n, expected, held, variants, factor, evidence))]
    return explain_gradients(evidence, 0, what, off) if off else []


def _sides(evidence: Evidence, what: str) -> tuple[Parts, list[Parts], list[Parts]]:
    """What one device has, its variants, and the ranks."""
    one, ranks = evidence.step(0)
    variants = [getattr(run.steps[0], what) for run in evidence.one.variants]
    return getattr(one, what), variants, [getattr(record, what) for record in ranks]


def _factors(evidence: Evidence, what: str, names: Collection[str]) -> "dict[str, Factor]":
    expected, variants, _ = _sides(evidence, what)
    if evidence.own_types:
        return {name: around_first(name, expected, variants) for name in expected if name in names}
    return around_mean([name for name in expected if name in names], expected, variants)


def say_errors(evidence: Evidence, precision: str) -> tuple[str, ...]:
    """A note on how far the gradients are apart that are equal as far as rounding allows; none where that says little
    of all of them.
    """
    noisy, errors, factors = noisy_gradients(evidence.one), list[float](), list[float]()
    for what, names in _before_clipping(evidence):
        expected, _, held = _sides(evidence, what)
        for name, factor in _factors(evidence, what, set(names) - set(noisy)).items():
            whole = expected[name].value.double()
            for _, value in copies_of(name, whole, held, evidence.places) if bool(whole.any()) else ():
                errors.append(distance(value, whole)[0])
                factors.append(abs(_factor(value, factor.of) - 1))
    return (EQUAL.format(precision, 100 * max(errors), 100 * max(factors)),) if errors else ()


@final
@dataclass(frozen=True)
class Factor:
    """By which factor a tensor may be too large or too small.

    Attributes:
        of: what it is a factor of.
        allowed: how far it may be from 1.
    """

    of: torch.Tensor
    allowed: float


def around_first(name: str, expected: Parts, variants: Sequence[Parts]) -> Factor:
    """Of an own loop, of which only shakes are known: a multiple of the largest deviation from the first run."""
    first, *others = _values(name, expected, variants)
    return Factor(first, max([LEAST_FACTOR, *(TIMES_FACTOR * abs(_factor(v, first) - 1) for v in others)]))


def around_mean(names: Sequence[str], expected: Parts, variants: Sequence[Parts]) -> dict[str, Factor]:
    """Of a Task: some standard deviations around the mean of all runs of one device."""
    seen = {name: _seen(_values(name, expected, variants)) for name in names}
    known = [one.variance for one in seen.values() if one.number > 1 and bool(one.mean.any())]
    most = MOST_POOLED * median(known) if known else 0.0
    pooled = fmean(min(variance, most) for variance in known) if known else 0.0
    return {name: Factor(one.mean, _allowed(one, pooled)) for name, one in seen.items()}


@final
@dataclass(frozen=True)
class _Seen:
    """What runs of one device have of a tensor: their number, their mean, the variance of a run's factor."""

    number: int
    mean: torch.Tensor
    variance: float


def _seen(values: Sequence[torch.Tensor]) -> _Seen:
    """Each run is compared with the mean of the others: it would be like any mean that it is in."""
    number, total = len(values), torch.stack([*values]).sum(0)
    apart = [_factor(value, (total - value) / (number - 1)) - 1 for value in values] if number > 1 else [0.0]
    # Such a difference has the variance of a run, and of a mean of number - 1 runs.
    return _Seen(number, total / number, fmean(d * d for d in apart) * (number - 1) / number)


def _allowed(one: _Seen, pooled: float) -> float:
    own = one.number - 1
    noise = math.sqrt((own * one.variance + POOLED_RUNS * pooled) / (own + POOLED_RUNS))
    return max(LEAST_FACTOR, TIMES_NOISE * noise * math.sqrt(1 + 1 / one.number))


def _values(name: str, expected: Parts, variants: Sequence[Parts]) -> list[torch.Tensor]:
    return [parts[name].value.double() for parts in (expected, *variants) if name in parts]


def _factor(value: torch.Tensor, whole: torch.Tensor) -> float:
    """`distance`'s; 0 where there is nothing to be a factor of."""
    return distance(value, whole)[1] if bool(whole.any()) else 0.0


def compare_noisy(
    name: str, expected: Parts, ranks: Sequence[Parts], variants: Sequence[Parts], factor: Factor, evidence: Evidence
) -> Mismatch | None:
    """How one tensor is off, None where rounding explains it of every copy that the ranks hold."""
    whole = expected[name].value.double()
    copies = copies_of(name, whole, ranks, evidence.places)
    size = float(whole.abs().max()) if whole.numel() else 0.0
    if not copies:
        return Mismatch(name, (), size, 0.0, size, {}, agree=True, missing=True)
    if not size:
        return None
    noise = _noise(name, expected, variants)
    allowed = max(LEAST_ERROR, TIMES_ERROR * noise)
    if noise <= MOST_NOISE:
        allowed, factor = min(allowed, MOST_ERROR), Factor(factor.of, min(factor.allowed, MOST_ERROR))
    off, factors, worst = list[int](), dict[int, float](), 0.0
    for own, value in copies:
        error, times = distance(value, whole)[0], _factor(value, factor.of)
        factors |= dict.fromkeys(own, times if abs(times - 1) > factor.allowed else math.nan)
        if not (error <= allowed and abs(times - 1) <= factor.allowed):
            off += own
            worst = max(worst, error if math.isfinite(error) else math.inf)
    if not off:
        return None
    first = copies[0][1]
    apart = max(float((value - first).norm() / whole.norm()) for _, value in copies)
    ranks_off = tuple(sorted(set(off)))
    return Mismatch(name, ranks_off, worst * size, allowed * size, size, factors, agree=apart <= SAME_COPY)


def noisy_gradients(one: OneDevice) -> list[str]:
    """Names of the gradients of the first step which rounding alone moves so far that little is found in them."""
    found: list[str] = []
    for what in ("raw", "gradients"):
        expected: Parts = getattr(one.run.steps[0], what)
        variants = [getattr(run.steps[0], what) for run in one.variants]
        found += [name for name in expected if _noise(name, expected, variants) > MOST_NOISE]
    return list(dict.fromkeys(found))


def say_noisy(one: OneDevice, precision: str) -> tuple[str, ...]:
    """A note on `noisy_gradients`; none where there are none."""
    names = noisy_gradients(one)
    return (NOISY.format(precision, few(names)),) if names else ()


def _noise(name: str, expected: Parts, variants: Sequence[Parts]) -> float:
    """The largest relative error of what changes nothing but the rounding."""
    if name not in expected or not bool(expected[name].value.any()):
        return 0.0
    whole = expected[name].value.double()
    return max((distance(v[name].value.double(), whole)[0] for v in variants if name in v), default=0.0)


def distance(value: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """(relative error in the 2-norm, factor of the least squares)."""
    norm = float(whole.norm())
    factor = float(value.flatten() @ whole.flatten()) / (norm * norm)
    return float((value - whole).norm()) / norm, factor
