"""`plan --check`: dry runs of the best few, and the search made again with what they counted until these few stand."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.plan import Checked, Choice, Estimate
from allranks.planning.dry_run import DryRun, corrected, ratios, what_changed
from allranks.planning.estimator import Fit, Formulas
from allranks.planning.question import Question
from allranks.planning.search import Found, Search, front

FEW: Final = 3
"""Of the front of time and memory, the fastest first: so many are rehearsed, or fewer where there are no more.

Of what does not fit as planned, so many that come nearest at most.
"""
MOST_TRIES: Final = 10
"""Dry runs that are asked for at most, those which nobody can make among them."""


@final
class CorrectedEstimates:
    """The planner's formulas, but for what a dry run has corrected."""

    def __init__(self) -> None:
        self.known: dict[Choice, Estimate] = {}
        self._formulas = Formulas()

    def estimate(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Estimate:
        """What the choice costs, as far as is known now."""
        return self.known.get(choice) or self._formulas.estimate(profile, cluster, choice)

    def fit(self, profile: ModelProfile, cluster: Cluster, choice: Choice) -> Fit:
        """Whether it fits, as far as is known now."""
        return self.known.get(choice) or self._formulas.fit(profile, cluster, choice)


def search_checked(question: Question) -> tuple[Search, tuple[Checked, ...]]:
    """The search that `question` asks for, ended; and what dry runs said of its best few, in the order of their turns.

    A configuration that drops out, or becomes slower, lets another one up, which is rehearsed in its turn; one that
    cannot be rehearsed keeps its place, and the next takes its turn. Where nothing fits, what comes nearest is
    rehearsed: it may fit by what is counted. Without `question.rehearse` nothing is rehearsed.
    """
    space, estimates = question.space(), CorrectedEstimates()
    checks: dict[Choice, Checked] = {}
    while True:
        search = Search(space, estimates)
        search.run()
        planned = next_to_check(search.found, checks)
        if question.rehearse is None or planned is None:
            return search, tuple(checks.values())
        told = question.rehearse(question, planned.choice)
        if told is None:
            return search, tuple(checks.values())
        checks[planned.choice] = one = weigh(planned, told)
        if one.corrected is not None:
            estimates.known[planned.choice] = one.corrected


def next_to_check(found: Found, checks: Mapping[Choice, Checked]) -> Estimate | None:
    """The first of the best few that nobody has rehearsed yet; None where all stand, or enough was tried.

    Where none fits, the nearest.
    """
    if len(checks) >= MOST_TRIES:
        return None
    if found.best is None:
        enough = sum(not check.planned.fits for check in checks.values()) == FEW
        return None if enough or found.nearest is None or found.nearest.choice in checks else found.nearest
    standing = 0
    for one in front_of(found, checks):
        known = checks.get(one.choice)
        if known is None:
            return one
        standing += known.corrected is not None
        if standing == FEW:
            return None
    return None


def front_of(found: Found, checks: Mapping[Choice, Checked]) -> list[Estimate]:
    """The front of time and memory of what fits, the fastest first.

    Memory is compared as planned: counted memory has another margin, and would be compared with planned one.
    """
    fitting = [one for one in found.estimates.values() if one.fits]
    planned = {choice: check.planned.peak_bytes for choice, check in checks.items()}
    comparable = (replace(one, peak_bytes=planned[one.choice]) if one.choice in planned else one for one in fitting)
    return [found.estimates[one.choice] for one in front(comparable)]


def weigh(planned: Estimate, told: DryRun | str) -> Checked:
    """What a dry run makes of an Estimate; of a text, why there is none."""
    if isinstance(told, str):
        return Checked(planned, None, told)
    return Checked(planned, corrected(planned, told), what_changed(planned, told), ratios(planned, told))
