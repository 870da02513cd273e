"""Noise that was made a function of the sample: whether it is noise for the samples, and whose a rank goes by."""

from collections.abc import Callable, Sequence
from fractions import Fraction

from allranks.errors import ProcessError
from allranks.verifying.answer import Answer
from allranks.verifying.determinism import first_difference
from allranks.verifying.evidence import Evidence
from allranks.verifying.recording import RunRecord, StepRecord


def is_own_noise_alike(answer: Answer) -> bool:
    """Whether every rank and one device draw noise from generators of their own for their own samples equally often."""
    runs = [*answer.ranks] if answer.one is None else [answer.one.run, *answer.ranks]
    counts = [[sum(draw.own for draw in step.draws) for step in run.steps] for run in runs]
    return all(len(set(some)) == 1 for some in zip(*counts, strict=False))


def is_single_noise_alike(answer: Answer) -> bool:
    """Whether one device and each rank that has samples in a step draw one number for each of them equally often.

    If not, as many numbers as samples have been taken for noise by chance on one side alone, and what was found may
    come of that.
    """
    if not answer.findings or answer.one is None or answer.noise is not None:
        return True
    steps = zip(*(run.steps for run in (answer.one.run, *answer.ranks)), strict=False)
    return all(len({_often(record) for record in records if record.rows}) <= 1 for records in steps)


def _often(record: StepRecord) -> Fraction:
    drawn = [draw for draw in record.draws if draw.single and not draw.again]
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
        both = zip(evidence.ranks, again, strict=True)
        if not any(first_difference(one, other, evidence.relative) for one, other in both):
            return False
    return True
