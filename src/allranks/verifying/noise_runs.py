"""Noise that was made a function of the sample: whether it is noise for the samples, and whose a rank goes by."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

from allranks.errors import ProcessError
from allranks.verifying.answer import Answer
from allranks.verifying.determinism import first_difference
from allranks.verifying.evidence import Evidence
from allranks.verifying.observer import NO_NOISE
from allranks.verifying.recording import Draw, Part, Parts, RunRecord, StepRecord
from allranks.verifying.update_state import align_settings

Kind = Callable[[Draw], bool]


def is_own_noise_alike(answer: Answer) -> bool:
    """Whether every rank and one device draw noise from generators of their own for their own samples equally often."""
    return _is_alike([*answer.ranks] if answer.one is None else [answer.one.run, *answer.ranks], lambda draw: draw.own)


def least_dims_alike(answer: Answer) -> int:
    """Of how many dims noise of torch's shared generator has to be to go with the sample on both sides; 1: whatever.

    Where one device and a rank that has samples do not draw one number for each of them equally often, as many numbers
    as samples have been taken for noise by chance on one side alone. And what ranks draw for no samples, in a shape in
    which one device does not, may be there a row for each of its samples: by chance (a mask of as many rows), or it is
    noise that ranks draw for other samples than those of a whole micro-batch. Then some noise there has such rows, or
    is drawn otherwise often for each sample; else it is for none, and what was found does not come of it.
    """
    if not answer.findings or answer.one is None or answer.noise is not None:
        return 1
    one = answer.one.run
    runs = [one, *answer.ranks]
    others = {shape[1:] for run in answer.ranks for shape in run.unclaimed - one.unclaimed if len(shape) > 1}
    rows = {draw.shape[1:] for step in one.steps for draw in step.drawn if draw.shared}
    if others & rows or (others and not _is_alike(runs, lambda draw: draw.shared and not draw.single)):
        return NO_NOISE
    return 1 if _is_alike(runs, lambda draw: draw.single) else 2


def _is_alike(runs: Sequence[RunRecord], is_one: Kind) -> bool:
    """Whether in each step those that have samples draw for each of them equally often."""
    steps = zip(*(run.steps for run in runs), strict=False)
    return all(len({_often(record, is_one) for record in records if record.rows}) <= 1 for records in steps)


def _often(record: StepRecord, is_one: Kind) -> Fraction:
    drawn = filter(is_one, record.drawn)
    return Fraction(sum(draw.shape[0] for draw in drawn), len(record.rows))


def does_noise_matter(run: Callable[[frozenset[int]], Sequence[RunRecord]], evidence: Evidence) -> bool:
    """Whether ranks that share samples each go by their own noise.

    Else one of them gives its noise to the others, the first of them or another one: then it changes nothing what
    those others, or the first, draw. Nor is anything said where a run fails.

    Args:
        run: all ranks once more; those it is told draw other noise.
    """
    firsts = frozenset(evidence.world.firsts)
    for salted in (frozenset(range(evidence.world.size)) - firsts, firsts):
        try:
            again = run(salted)
        except (RuntimeError, ProcessError):  # it raised; it was killed, or ended itself
            return False
        for run_again in again:
            align_settings(run_again, evidence.one.run)
        both = zip(map(_for_itself, evidence.ranks), map(_for_itself, again), strict=True)
        if not any(first_difference(one, other, evidence.relative) for one, other in both):
            return False
    return True


def _for_itself(run: RunRecord) -> RunRecord:
    """A rank's run as that of one device: what it holds of a tensor is the whole of it."""
    return replace(run, steps=[_without_places(step) for step in run.steps])


def _without_places(step: StepRecord) -> StepRecord:
    step = replace(step, raw=_whole(step.raw), gradients=_whole(step.gradients), parameters=_whole(step.parameters))
    return replace(step, buffers=_whole(step.buffers), kept=_whole(step.kept))


def _whole(parts: Parts) -> Parts:
    return {name: Part(None, value) for name, (_, value) in parts.items()}
