"""Whether every epoch has the order of the one before, which a program may give it on one device, too."""

from collections.abc import Sequence

from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding, found

WHAT = "the ranks' samples come in the same order in every epoch"
ANEW = "let the seed of the shuffle depend on the epoch, as seed + epoch does"


def judge_epochs(evidence: Evidence) -> list[Finding]:
    """Whether ranks shuffle every epoch as the one before: by what samplers tell, or a permutation drawn again."""
    if evidence.world.size < 2:
        return []
    epochs = sorted({epoch for run in evidence.ranks for epoch in run.repeated_epochs})
    if epochs:
        said = f"a DistributedSampler that shuffles has begun epoch {epochs[0]} again: its next has the same order"
        return [found("S1", WHAT, said)]
    again = _shuffled_again(evidence)
    return [found("S1", WHAT, again, next=ANEW)] if again else []


def _shuffled_again(evidence: Evidence) -> str:
    """In words, which permutation was drawn again for an epoch; "" where none was.

    That alone is no mistake: a split into train and validation samples may be drawn again, and what is not shuffled has
    one order by right. So all samples have to come again in their order as well, and to be as many as it permutes.
    """
    firsts = [evidence.ranks[rank] for rank in evidence.world.firsts]
    records = [[run.steps[step] for run in firsts] for step in range(evidence.num_steps)]
    steps = [[row for record in some for row in record.rows] for some in records]
    period = period_of(steps)
    epoch, known = steps[:period], {row for rows in steps[:period] for row in rows}
    number = sum(map(len, epoch))
    if 2 * len(known) <= number or any(record.packed for some in records for record in some):
        return ""  # no period; or samples that are alike, and come again in any order
    # Of full batches there may have been a last one that was not, and was dropped; a sampler may repeat some samples.
    dropped = len(epoch[0]) if len({len(rows) for rows in epoch}) == 1 else 1
    fits = [length for length in firsts[0].redrawn if number - len(firsts) < length < number + dropped]
    if not fits:
        return ""
    return (
        f"a permutation of {fits[0]} is drawn again with the same values while the data is made, and all samples come "
        f"again in their order after {period} step{'s' if period > 1 else ''}"
    )


def period_of(steps: Sequence[Sequence[int]]) -> int:
    """After how many steps the same samples come in the same order again; 0 for never."""
    for period in range(1, len(steps)):
        if all(list(steps[i]) == list(steps[i + period]) for i in range(len(steps) - period)):
            return period
    return 0
