"""Gradients of a run in a low precision: how far off is decided by what rounding in that precision was seen to do.

Two numbers for each tensor: the relative error (in the 2-norm), and the factor by which it is too large, which is known
much better, since rounding averages out in it.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

import torch

from allranks.verifying.assembly import Mismatch, put_together
from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding
from allranks.verifying.gradient_causes import explain_gradients
from allranks.verifying.recording import Parts

TIMES_ERROR: Final = 4.0  # of the largest error of a variant
TIMES_FACTOR: Final = 8.0  # of the largest deviation of a variant's factor
LEAST_FACTOR: Final = 0.004  # half an ulp of bfloat16: a factor nearer to 1 than that is not seen
LEAST_ERROR: Final = 0.008


def judge_low_precision(evidence: Evidence) -> list[Finding]:
    """Findings on the gradients of the first step, from the same parameters and samples; before clipping, if it is."""
    one, ranks = evidence.step(0)
    # Some of the parameters may be clipped, and by whatever the ranks clip.
    raw = set(one.raw) if all(record.raw for record in ranks) else set()
    return _judge_some(evidence, "raw", raw) or _judge_some(evidence, "gradients", set(one.gradients) - raw)


def _judge_some(evidence: Evidence, what: str, names: Collection[str]) -> list[Finding]:
    one, ranks = evidence.step(0)
    expected: Parts = getattr(one, what)
    variants = [getattr(run.steps[0], what) for run in evidence.one.variants]
    held = [getattr(record, what) for record in ranks]
    off = [m for n in expected if n in names and (m := compare_noisy(n, expected, held, variants, evidence))]
    return explain_gradients(evidence, 0, what, off) if off else []


def compare_noisy(
    name: str, expected: Parts, ranks: Sequence[Parts], variants: Sequence[Parts], evidence: Evidence
) -> Mismatch | None:
    """How one tensor is off, None where rounding explains it."""
    whole = expected[name].value.double()
    value = put_together(name, whole, ranks, evidence.places)
    size = float(whole.abs().max()) if whole.numel() else 0.0
    if value is None:
        return Mismatch(name, (), size, 0.0, size, {}, agree=True, missing=True)
    if not size:
        return None
    noise = [distance(v[name].value.double(), whole) for v in variants if name in v]
    error, factor = distance(value, whole)
    allowed = max([LEAST_ERROR, *(TIMES_ERROR * e for e, _ in noise)])
    allowed_factor = max([LEAST_FACTOR, *(TIMES_FACTOR * abs(f - 1) for _, f in noise)])
    if error <= allowed and abs(factor - 1) <= allowed_factor:
        return None
    factors = {0: factor} if abs(factor - 1) > allowed_factor else {0: math.nan}
    everyone = tuple(range(len(ranks)))
    return Mismatch(name, everyone, error * size, allowed * size, size, factors, agree=True)


def distance(value: torch.Tensor, whole: torch.Tensor) -> tuple[float, float]:
    """(relative error in the 2-norm, factor of the least squares)."""
    norm = float(whole.norm())
    factor = float(value.flatten() @ whole.flatten()) / (norm * norm)
    return float((value - whole).norm()) / norm, factor
