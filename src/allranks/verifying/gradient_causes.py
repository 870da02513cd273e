"""Why gradients differ: by which ranks, tensors and factors, and by what a least-squares fit of the ranks' own says."""

import math
from collections.abc import Sequence
from functools import partial

import torch

from allranks.verifying.assembly import Mismatch
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.recording import Parts
from allranks.verifying.weights import weights_of
from allranks.verifying.wrapper_watch import is_below

OF_FLOAT32, OF_BFLOAT16 = 1e-5, 0.03  # relative: how far some roundings in a forward move a gradient at most
DIVIDED = "look at what the loss is divided by: the same number on all ranks as on one device"
ROUNDED = {torch.bfloat16: 0.05, torch.float16: 0.05, torch.float32: OF_FLOAT32}
"""Relative, of a tensor's largest value: what is further off has not been moved by being rounded to that type alone."""


def explain_gradients(evidence: Evidence, step: int, what: str, off: Sequence[Mismatch]) -> list[Finding]:
    """Findings for gradients that differ in `step`; `what` is "raw" or "gradients"."""
    one, _ = evidence.step(step)
    expected: Parts = getattr(one, what)
    apart = [m for m in off if not m.agree]
    if apart:
        return [_unsynchronised(evidence, step, what, apart, len(off) == len(expected))]
    tied = {name for names in evidence.one.run.start.tied for name in names}
    if tied and all(m.name in tied for m in off):
        return [_finding("S14", evidence, step, off, "the gradient of tied tensors")]
    factor = common_factor(off)
    everything = len(off) == len([n for n, p in expected.items() if bool(p.value.any())])
    if not math.isnan(factor) and factor != 0.0:
        return [_scaled(evidence, step, off, factor, everything, what)]
    if everything and _each_rank_by_its_own(off):
        return [_finding("S13", evidence, step, off, "every gradient, by a factor of each rank's own,",
                         axis=evidence.world.axis_where(partial(_have_other_factors, off)))]  # fmt: skip
    if any(m.missing or m.factor == 0.0 for m in off):
        gone = [m for m in off if m.missing or m.factor == 0.0]
        return [_finding("S11", evidence, step, gone, "a gradient that one device has")]
    return [_combined(evidence, step, what, off, everything)]


def _unsynchronised(evidence: Evidence, step: int, what: str, apart: Sequence[Mismatch], everything: bool) -> Finding:
    """Ranks hold the same parameter and another gradient of it."""
    world = evidence.world
    inside = world.model_ranks > 1 and _differ_among_twins(evidence, step, what, apart[0].name)
    if inside:
        return _finding("S15", evidence, step, apart, "a gradient differs over ranks with the same samples",
                        axis=evidence.axis_apart(step, what, apart[0], world.model_axis))  # fmt: skip
    _, ranks = evidence.step(step)
    lone = {rank for m in apart for rank in m.ranks}
    if all(is_below(m.name, record.past) for m in apart for record in ranks):
        kind = "S10"
    elif len(lone) == 1 and world.size > 2 and not everything:
        kind = "S39"
    else:
        kind = "S11"
    axis = evidence.axis_apart(step, what, apart[0], world.data_axis)
    return _finding(kind, evidence, step, apart, "each rank has a gradient of its own", axis=axis)


def _differ_among_twins(evidence: Evidence, step: int, what: str, name: str) -> bool:
    _, ranks = evidence.step(step)
    for rank in range(evidence.world.size):
        values = [getattr(ranks[twin], what).get(name) for twin in evidence.world.twins(rank)]
        tensors = [part.value for part in values if part is not None]
        if any(t.shape == tensors[0].shape and not torch.allclose(t, tensors[0], rtol=1e-9) for t in tensors[1:]):
            return True
    return False


def common_factor(off: Sequence[Mismatch]) -> float:
    """The factor by which all of them are off; nan where there is none."""
    factors = [m.factor for m in off]
    same = all(abs(f - factors[0]) <= 1e-5 * max(1.0, abs(f)) for f in factors)
    return factors[0] if same else math.nan


def _each_rank_by_its_own(off: Sequence[Mismatch]) -> bool:
    """Whether each rank has one factor for all tensors, and not all ranks the same: a norm of its own part."""
    by_rank: dict[int, list[float]] = {}
    for m in off:
        for rank, factor in m.factors.items():
            by_rank.setdefault(rank, []).append(factor)
    alike = all(max(some) - min(some) <= 1e-5 * max(map(abs, some)) for some in by_rank.values())
    return alike and len({round(some[0], 5) for some in by_rank.values()}) > 1


def _have_other_factors(off: Sequence[Mismatch], one: int, other: int) -> bool:
    """Whether two ranks have other factors of the tensors that both hold a part of."""
    pairs = [(m.factors[one], m.factors[other]) for m in off if one in m.factors and other in m.factors]
    return any(abs(mine - others) > 1e-5 * max(abs(mine), abs(others)) for mine, others in pairs)


def _scaled(
    evidence: Evidence, step: int, off: Sequence[Mismatch], factor: float, everything: bool, what: str
) -> Finding:
    """Every gradient that is off is off by one factor."""
    world, (one, _) = evidence.world, evidence.step(step)
    clipped = one.norm is not None and what == "gradients"
    if not everything:
        some = [m for m in off if _held_by(evidence, m.name) < world.size]
        cut = [m for m in off if _is_cut(evidence, m.name)]
        if len(some) == len(off) and world.model_ranks == 1:
            return _finding("S36", evidence, step, off, "the gradient of what only some ranks hold")
        if world.model_ranks > 1 and not cut:
            kind = "S15" if abs(factor) < 1 else "S16"  # a sum too few, or one too many
            return _finding(kind, evidence, step, off, "the gradient of parameters that every rank holds whole",
                            axis=world.by_factor(factor, world.model_axis))  # fmt: skip
        kind = "S36" if _look_like_experts(evidence, off) else "S16"
        return _finding(kind, evidence, step, off, "the gradient of some parameters", axis=world.axis_of_factor(factor))
    if clipped:
        return _finding("S13", evidence, step, off, "every gradient after clipping")
    share = weights_of(evidence, step, what)
    if share is not None and share[0] in ("S8", "S9"):
        return _finding(
            share[0], evidence, step, off, "every gradient", said=share[1], axis=world.axis_of_factor(factor)
        )
    if share is not None and share[0] == "S29" and world.is_count(factor, world.data_ranks):
        return _finding("S29", evidence, step, off, "every gradient", said=share[1], axis=world.data_axis)
    kind = OTHER if what == "raw" else "S13"  # before clipping no norm has had a part in it
    if world.is_count(factor, world.micro_batches):
        kind = "S8"
    elif world.is_count(factor, world.model_ranks):
        kind = "S16"
    elif world.is_count(factor, world.data_ranks):
        kind = "S9" if world.model_ranks == 1 else "S16"
    elif world.counts_an_axis(factor):
        kind = "S16"
    return _finding(kind, evidence, step, off, "every gradient", axis=world.axis_of_factor(factor),
                    next=DIVIDED if kind == OTHER else "")  # fmt: skip


def _look_like_experts(evidence: Evidence, off: Sequence[Mismatch]) -> bool:
    """Stacked matrices, one for each expert: three dims where the other parameters have fewer."""
    dims = {name: part.value.dim() for name, part in evidence.one.run.start.parameters.items()}
    stacked = {m.name for m in off}
    return all(dim == 3 if name in stacked else dim < 3 for name, dim in dims.items())


def _held_by(evidence: Evidence, name: str) -> int:
    return sum(name in run.start.parameters for run in evidence.ranks)


def _is_cut(evidence: Evidence, name: str) -> bool:
    whole = evidence.one.run.start.parameters[name].value.shape
    return any(
        run.start.parameters[name].value.shape != whole for run in evidence.ranks if name in run.start.parameters
    )


def _combined(evidence: Evidence, step: int, what: str, off: Sequence[Mismatch], everything: bool) -> Finding:
    """No factor fits: weights of the ranks' own gradients, batch statistics, a coupled loss, or rounding."""
    world = evidence.world
    if evidence.one.run.start.statistics and evidence.compare(step, "buffers"):
        layers = ", ".join(evidence.one.run.start.statistics)
        return _finding("S25", evidence, step, off, f"gradients under {layers}", axis=world.data_axis)
    rounded = _rounded(evidence, step, what, off)
    if rounded:
        return _finding("S37", evidence, step, off, f"gradients rounded to {rounded}", axis=world.data_axis)
    if all(_held_by(evidence, m.name) < world.size for m in off):
        return _finding("S36", evidence, step, off, "the gradient of what only some ranks hold")
    share = weights_of(evidence, step, what)
    if share is not None:
        return _finding(share[0], evidence, step, off, "gradients", said=share[1], axis=world.data_axis)
    if _drew_again(evidence, step):
        return _finding("S34", evidence, step, off, "gradients")
    rounding = _like_rounding(off)
    if rounding:
        return _finding("S27", evidence, step, off, f"gradients, as far as {rounding} rounds,")
    if world.model_ranks > 1:
        return _finding("S16", evidence, step, off, "gradients", axis=world.model_axis)
    axis = world.data_axis if world.data_ranks > 1 else ""  # the only one
    return _finding(OTHER if not everything else "S16", evidence, step, off, "gradients", axis=axis)


def _drew_again(evidence: Evidence, step: int) -> bool:
    """Whether a recomputation drew what no forward of the step had drawn."""
    _, ranks = evidence.step(step)
    return any(one.drawn_otherwise for one in ranks)


def _like_rounding(off: Sequence[Mismatch]) -> str:
    """The precision in which something may be computed that moves gradients so little; "" where they are far off."""
    worst = max(m.relative for m in off)
    return "float32" if worst < OF_FLOAT32 else "bfloat16 or float16" if worst < OF_BFLOAT16 else ""


def _rounded(evidence: Evidence, step: int, what: str, off: Sequence[Mismatch]) -> str:
    """The low precision whose grid the ranks' gradients, or their sums, lie on; "" for none."""
    _, ranks = evidence.step(step)
    for dtype, most in ROUNDED.items():
        if any(m.relative > most for m in off):
            continue
        values = [getattr(ranks[m.ranks[0]], what)[m.name].value for m in off if m.ranks]
        for times in (1, evidence.world.data_ranks, evidence.world.size):
            if any(value.dtype == dtype for value in values):
                continue
            on_grid = [bool(((v * times).to(dtype).to(v.dtype) == v * times).all()) for v in values]
            if values and all(on_grid):
                return str(dtype).removeprefix("torch.")
    return ""


def _finding(
    kind: str,
    evidence: Evidence,
    step: int,
    off: Sequence[Mismatch],
    what: str,
    said: str = "",
    axis: str = "",
    next: str = "",
) -> Finding:
    first, world = off[0], evidence.world
    lines = [describe(m, "gradient of", world, axis) for m in off[:3]]
    if said:
        lines.insert(0, said)
    factor = world.in_words(common_factor(off), axis)
    times = f" by the factor {factor}" if factor != "" else ""
    over = f" over {axis}" if axis else ""
    return found(
        kind,
        f"step {step}: {what} differs{times}{over}: {few([m.name for m in off])}",
        *lines,
        tensor=first.name,
        axis=axis,
        factor=factor,
        step=step,
        error=first.relative,
        next=next,
    )
