"""From what one device and the ranks did to findings: the first thing that differs, and what stands apart from it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from allranks.verifying.assembly import Mismatch, allowance
from allranks.verifying.data_causes import (
    judge_fed,
    judge_samples,
    judge_seeds,
    judge_values,
)
from allranks.verifying.drawn_causes import judge_draws, judge_dropping
from allranks.verifying.end_causes import judge_evaluation, judge_resume
from allranks.verifying.epoch_causes import judge_epochs
from allranks.verifying.evidence import Evidence, describe, few
from allranks.verifying.findings import OTHER, Finding, found
from allranks.verifying.gradient_causes import explain_gradients
from allranks.verifying.start_causes import judge_start
from allranks.verifying.update_causes import explain_parameters, judge_schedules, judge_settings, judge_updates

LEDGER = "ledger"
OF_EACH = "return each rank's own loss, or the world's: sum numerators and counts over ranks, and divide once"


def judge(evidence: Evidence, *, start: bool = True) -> list[Finding]:
    """Every finding that is not the consequence of another one; empty where the ranks compute what one device does.

    Args:
        start: whether the two sides have to begin with the same bits.

    The order is that of a step: start, samples, gradients, clipping, update, buffers, what is kept, what is reported.
    The first that differs ends the chain: what comes after it differs because of it.
    """
    chain = judge_start(evidence) if start else []
    if not chain:
        chain = _steps(evidence)
    apart = judge_ranks(evidence) + _first(evidence, judge_dropping) + _first(evidence, judge_settings)
    kinds = {finding.verdict.kind for finding in chain}
    findings = chain + [finding for finding in apart if finding.verdict.kind not in kinds]
    if not findings:
        findings += _first(evidence, judge_schedules) or _reported(evidence)
    if not chain:
        findings += judge_resume(evidence) + judge_evaluation(evidence)
    return findings


def judge_ranks(evidence: Evidence) -> list[Finding]:
    """Findings that need no comparison with one device: of what a world's ranks have to do alike, and what not."""
    return judge_epochs(evidence) + judge_seeds(evidence) + _first(evidence, judge_draws)


def _first(evidence: Evidence, judge_step: Callable[[Evidence, int], list[Finding]]) -> list[Finding]:
    for step in range(evidence.num_steps):
        found_here = judge_step(evidence, step)
        if found_here:
            return found_here
    return []


def _steps(evidence: Evidence) -> list[Finding]:
    lengths = {len(run.steps) for run in evidence.ranks} | {len(evidence.one.run.steps)}
    for step in range(evidence.num_steps):
        found_here = _step(evidence, step)
        if found_here:
            return found_here
    if len(lengths) > 1:
        counts = f"one device {len(evidence.one.run.steps)}, ranks {[len(run.steps) for run in evidence.ranks]}"
        return [found("S3", "the data ends sooner on some ranks than on one device", f"steps: {counts}")]
    return []


def _step(evidence: Evidence, step: int) -> list[Finding]:
    samples = judge_fed(evidence, step)
    if samples:
        return samples
    gradients = _gradients(evidence, step)
    if gradients:
        return [_with_samples(finding, judge_samples(evidence, step)) for finding in gradients]
    updates = judge_updates(evidence, step) or judge_settings(evidence, step)
    if updates:
        return updates
    off = evidence.compare(step, "parameters")
    if off:
        return explain_parameters(evidence, step, off)
    return _beside(evidence, step)


def _gradients(evidence: Evidence, step: int) -> list[Finding]:
    """What is wrong with gradients and their norm, before clipping where they are clipped."""
    one, ranks = evidence.step(step)
    clipped = bool(one.raw) and all(record.raw for record in ranks)
    for what in ("raw", "gradients") if clipped else ("gradients",):
        off = [m for m in evidence.compare(step, what)]
        unmatched = [m for m in off if not (m.missing and m.size == 0.0)]
        if unmatched and what == "raw" and _agree_later(evidence, step, unmatched):
            said = "when they are clipped each rank has its own, and when the optimizer takes them all have the same"
            return [found("S13", f"step {step}: gradients are clipped before they are summed over ranks", said,
                          tensor=unmatched[0].name, step=step,
                          axis=evidence.axis_apart(step, what, unmatched[0], evidence.world.data_axis))]  # fmt: skip
        if unmatched:
            return judge_values(evidence, step) or explain_gradients(evidence, step, what, unmatched)
        if what == "raw":
            norms = _norms(evidence, step)
            if norms:
                return norms
    return []


def _with_samples(finding: Finding, samples: Sequence[Finding]) -> Finding:
    """A finding on gradients, and below it that samples are other ones by their values, where they are."""
    lines = [f"{one.verdict.what}, which is right if what differs is their number in the batch" for one in samples]
    return replace(finding, verdict=replace(finding.verdict, evidence=(*finding.verdict.evidence, *lines)))


def _agree_later(evidence: Evidence, step: int, off: Sequence[Mismatch]) -> bool:
    """Whether data ranks part in gradients before clipping, and agree in them when the optimizer begins."""
    apart = evidence.world.data_ranks > 1 and any(not m.agree for m in off)
    _, ranks = evidence.step(step)
    taken = all(record.gradients for record in ranks)  # of a Task they are looked at once, before clipping
    return apart and taken and all(m.agree for m in evidence.compare(step, "gradients"))


def _norms(evidence: Evidence, step: int) -> list[Finding]:
    one, ranks = evidence.step(step)
    if one.norm is None:
        return []
    moved = [run.steps[step].norm for run in evidence.one.variants if len(run.steps) > step]
    apart = max((abs(norm - one.norm) for norm in moved if norm is not None), default=0.0)
    allowed = max(evidence.relative * abs(one.norm), allowance(apart, abs(one.norm)))
    off = {rank: record.norm for rank, record in enumerate(ranks) if not _near(record.norm, one.norm, allowed)}
    if not off:
        return []
    _, norm = next(iter(off.items()))
    times = (norm or 0.0) / one.norm if one.norm else math.nan
    square = times * times  # infinite where ** would raise
    told = {rank: record.norm or 0.0 for rank, record in enumerate(ranks)}
    alike = max(told.values()) - min(told.values()) <= allowed
    axis = (
        evidence.world.axis_of_factor(square)
        if alike
        else evidence.world.axis_where(lambda rank, other: abs(told[rank] - told[other]) > allowed)
    )
    said = f"before clipping the norm is {one.norm:.6g} on one device, {[record.norm for record in ranks]} on the ranks"
    factor = evidence.world.in_words(square, axis)
    more = f"its square is {factor} times what one device has" if factor != "" else "the gradients are equal"
    return [found("S13", f"step {step}: the gradient norm is not that of the whole model", said, more,
                  axis=axis, factor=factor, step=step)]  # fmt: skip


def _near(value: float | None, due: float, allowed: float) -> bool:
    return value is not None and abs(value - due) <= allowed


def _beside(evidence: Evidence, step: int) -> list[Finding]:
    """Buffers and what the program keeps, after a step whose parameters are right."""
    buffers = [m for m in evidence.compare(step, "buffers") if not m.missing]
    world = evidence.world
    if buffers:
        axis = evidence.axis_apart(step, "buffers", buffers[0])
        lines = [describe(m, "buffer", world, axis) for m in buffers[:3]]
        rounded = _rounding_of(evidence, step, [m.name for m in buffers])
        if rounded:
            lines.insert(0, f"every value of them is one of {rounded}'s")
        kind, names = "S26" if rounded else "S25", few([m.name for m in buffers])
        return [found(kind, f"step {step}: buffers differ: {names}", *lines,
                      tensor=buffers[0].name, axis=axis, step=step)]  # fmt: skip
    kept = evidence.compare(step, "kept")
    if kept and kept[0].name == LEDGER:
        said = "the journal's sum over all samples is not that of the samples that were fed"
        return [found(OTHER, f"step {step}: the ledger is wrong", said, step=step)]
    if kept:
        lines = [describe(m, "", world).strip() for m in kept[:3]]
        return [found("S31", f"step {step}: what the program keeps differs: {few([m.name for m in kept])}", *lines,
                      tensor=kept[0].name, step=step, factor=world.in_words(kept[0].factor))]  # fmt: skip
    return []


def _rounding_of(evidence: Evidence, step: int, names: Sequence[str]) -> str:
    """The low precision on whose grid the ranks' buffers lie, and one device's do not; "" for none."""
    one, ranks = evidence.step(step)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        held = [record.buffers[n].value for record in ranks for n in names if n in record.buffers]
        due = [one.buffers[n].value for n in names]
        if all(_on_grid(value, dtype) for value in held) and not all(_on_grid(value, dtype) for value in due):
            return name
    return ""


def _on_grid(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((value.to(dtype).to(value.dtype) == value).all())


def _reported(evidence: Evidence) -> list[Finding]:
    """Whether the loss that a step returns is the world's, on each rank that returns one, or at least their mean is."""
    world = evidence.world
    for step in range(evidence.num_steps):
        one, ranks = evidence.step(step)
        # A rank that leaves it to the others returns nothing.
        told = {rank: record.loss for rank, record in enumerate(ranks) if record.loss is not None}
        if one.loss is None or not told:
            continue
        allowed = _loss_allowed(evidence, step, one.loss)
        if all(abs(value - one.loss) <= allowed for value in told.values()) or _own_shares(
            evidence, step, told, one.loss, allowed
        ):
            continue
        some = f"rank {', '.join(map(str, told))} alone" if len(told) < len(ranks) else "the ranks"
        said = f"loss {one.loss:.9g} on one device, {', '.join(f'{v:.9g}' for v in told.values())} on {some}"
        axis = world.axis_of_values(told, one.loss, allowed)
        factor = world.in_words(next(iter(told.values())) / one.loss, axis) if one.loss else ""
        return [found("S30", f"step {step}: the loss that is reported is not the world's", said,
                      axis=axis, factor=factor, step=step, next=OF_EACH if len(told) < len(ranks) else "")]  # fmt: skip
    return []


def _loss_allowed(evidence: Evidence, step: int, due: float) -> float:
    moved = [run.steps[step].loss for run in evidence.one.variants if len(run.steps) > step]
    apart = max((abs(loss - due) for loss in moved if loss is not None and math.isfinite(loss)), default=0.0)
    losses = [abs(step.loss) for step in evidence.one.run.steps if step.loss is not None]
    return max(evidence.relative * abs(due), allowance(apart, abs(due), max(losses)), 1e-15)


def _own_shares(evidence: Evidence, step: int, told: Mapping[int, float], due: float, allowed: float) -> bool:
    """Whether each rank reports its own samples' loss, of which the mean, by samples or by ranks, is the world's.

    Of ranks that see the same samples some may be silent, but equally many of each: a mean of `told` (by rank) without
    some samples' loss is none of the world's.
    """
    (_, ranks), numbers = evidence.step(step), evidence.world.data_rank
    tellers = Counter(numbers[rank] for rank in told)
    fed = {numbers[rank] for rank, record in enumerate(ranks) if record.rows}
    if not fed <= tellers.keys() or len(set(tellers.values())) > 1:
        return False
    weights = {rank: len(ranks[rank].rows) for rank in told}
    mean = sum(value * weights[rank] for rank, value in told.items()) / max(1, sum(weights.values()))
    even = sum(told.values()) / len(told)
    alike = max(told.values()) - min(told.values()) <= allowed
    return not alike and any(abs(found_here - due) <= allowed for found_here in (mean, even))
