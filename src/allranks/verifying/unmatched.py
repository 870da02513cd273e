"""What the ranks of an own loop tell and one device does not: there is nothing to compare it with."""

from collections.abc import Mapping, Sequence

from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import Finding, found

UNMATCHED = "return {} from {} in a world of one process, too: there is nothing to compare it with"


def judge_unmatched(evidence: Evidence) -> list[Finding]:
    """Whether ranks of an own loop report or keep something under a name that one device has not.

    It would be compared with nothing. (A Task's ranks keep what they need for a checkpoint, under names of their own.)
    """
    one, runs = evidence.one.run, evidence.ranks
    told = _unmatched([run.evaluation or {} for run in runs], one.evaluation or {})
    if told is not None:
        name, where = told
        return [found("S30", f"evaluation: {name} is reported on {where}, and not on one device", tensor=name,
                      next=UNMATCHED.format(name, "evaluate"))]  # fmt: skip
    for step in range(evidence.num_steps):
        due, ranks = evidence.step(step)
        told = _unmatched([record.kept for record in ranks], due.kept)
        if told is not None:
            name, where = told
            what = f"step {step}: {name} is kept on {where}, and not on one device"
            return [found("S31", what, tensor=name, step=step,
                          next=UNMATCHED.format(name, "state"))]  # fmt: skip
    return []


def _unmatched(ranks: Sequence[Mapping[str, object]], one: Mapping[str, object]) -> tuple[str, str] | None:
    """A name that ranks have and one device has not, and which ranks, in words."""
    for name in (name for some in ranks for name in some if name not in one):
        return name, f"rank {', '.join(str(rank) for rank, some in enumerate(ranks) if name in some)}"
    return None
