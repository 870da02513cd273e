"""The best few of a plan are rehearsed, and the plan is made again with what that counted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from allranks.plan import Choice, Estimate
from allranks.planning import checking
from allranks.planning.answer import make_plan
from allranks.planning.checking import FEW, CorrectedEstimates, search_checked
from allranks.planning.dry_run import DryRun
from allranks.planning.estimate import estimate
from allranks.planning.question import Question
from allranks.planning.room import room_of
from allranks.planning.search import Search, front
from tests.planning.questions import ask

QUESTION = ask(where="1x8:a100-80g")
Told = DryRun | str | None


def as_planned(found: Estimate) -> DryRun:
    """A dry run that counts just what was planned."""
    tensors = {name: getattr(found.memory, name) for name in ("weights", "gradients", "optimizer", "activations")}
    tensors |= {"logits": found.memory.logits, "gathered": found.memory.gathered}
    return DryRun(found.memory.total - found.memory.framework, found.memory.framework, tensors)


class Rehearsals:
    """Answers for dry runs, and notes which were asked for.

    Args:
        answer: (how many were asked for before, what was planned) -> what is told.
    """

    def __init__(self, answer: Callable[[int, Estimate], Told]) -> None:
        self._answer = answer
        self.asked: list[Choice] = []

    def __call__(self, question: Question, choice: Choice) -> Told:
        found = estimate(question.make_profile(question.seq, choice.precision), question.cluster, choice)
        self.asked.append(choice)
        return self._answer(len(self.asked) - 1, found)


def leading(number: int) -> list[Choice]:
    """The first of the front, as planned."""
    found = Search(QUESTION.space()).run()
    return [one.choice for one in front(one for one in found.estimates.values() if one.fits)][:number]


def test_where_all_stands_the_best_few_were_rehearsed() -> None:
    rehearsals = Rehearsals(lambda number, found: as_planned(found))
    search, checked = search_checked(replace(QUESTION, rehearse=rehearsals))
    assert rehearsals.asked == leading(FEW) and len(rehearsals.asked) == FEW
    assert search.found.best is not None and search.found.best.choice == rehearsals.asked[0]
    assert [one.outcome for one in checked] == ["stands"] * FEW
    assert checked[0].corrected is search.found.best


def test_counted_memory_does_not_decide_who_is_rehearsed() -> None:
    """It has another margin than what is planned: a best that needs little would leave no other on the front."""
    rehearsals = Rehearsals(lambda number, found: replace(as_planned(found), peak_bytes=1e9))
    plan = make_plan(replace(QUESTION, rehearse=rehearsals))
    assert rehearsals.asked == leading(FEW)
    runners = [one.estimate.choice for one in plan.others if not one.family]
    assert runners == [other.estimate.choice for other in make_plan(QUESTION).others if not other.family]


def test_nobody_rehearses_without_being_asked() -> None:
    search, checked = search_checked(QUESTION)
    assert checked == () and search.found.best is not None and search.found.best.choice == leading(1)[0]


@pytest.mark.full
def test_what_does_not_fit_after_all_drops_and_the_next_takes_its_turn() -> None:
    rehearsals = Rehearsals(lambda number, found: replace(as_planned(found), peak_bytes=1e12 if number == 0 else 1e9))
    plan = make_plan(replace(QUESTION, rehearse=rehearsals))
    dropped, *others = plan.checked
    assert dropped.outcome == "dropped" and [one.outcome for one in others] == ["stands"] * FEW
    assert plan.best is not None and plan.best.estimate.choice == rehearsals.asked[1] != leading(1)[0]
    assert plan.best.estimate is others[0].corrected
    (there,) = [one for one in plan.others if one.estimate.choice == leading(1)[0] and not one.family]
    assert there.because == dropped.because and "1.0 TB counted" in there.because and not there.estimate.fits


def test_what_would_fail_drops_with_the_reason() -> None:
    rehearsals = Rehearsals(lambda number, found: DryRun(fault="rank 3 waits; x") if number == 0 else as_planned(found))
    plan = make_plan(replace(QUESTION, rehearse=rehearsals))
    assert plan.checked[0].outcome == "dropped" and plan.checked[0].because == "would fail: rank 3 waits; x"
    assert plan.best is not None and plan.best.estimate.choice != rehearsals.asked[0]


def test_what_becomes_slower_is_overtaken() -> None:
    def answer(number: int, found: Estimate) -> DryRun:
        sent = {row.axis: row.sent_bytes * (1000 if number == 0 else 1) for row in found.traffic}
        return replace(as_planned(found), sent_bytes=sent)

    search, checked = search_checked(replace(QUESTION, rehearse=Rehearsals(answer)))
    assert checked[0].outcome == "stands" and next(iter(checked[0].traffic.values())) > 999
    assert search.found.best is not None and search.found.best.choice != checked[0].planned.choice


def test_what_cannot_be_rehearsed_keeps_its_place() -> None:
    rehearsals = Rehearsals(lambda number, found: "no rehearsal" if number == 0 else as_planned(found))
    plan = make_plan(replace(QUESTION, rehearse=rehearsals))
    assert [one.outcome for one in plan.checked] == ["not checked", *["stands"] * FEW]
    assert plan.checked[0].because == "no rehearsal"
    assert plan.best is not None and plan.best.estimate.choice == leading(1)[0] == rehearsals.asked[0]


def test_it_ends_where_nothing_can_be_rehearsed_or_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Rehearsals(lambda number, found: "no rehearsal")
    monkeypatch.setattr(checking, "MOST_TRIES", 2)
    _, checked = search_checked(replace(QUESTION, rehearse=refusing))
    assert len(refusing.asked) == len(checked) == 2
    monkeypatch.undo()
    late = Rehearsals(lambda number, found: None if number else as_planned(found))
    _, checked = search_checked(replace(QUESTION, rehearse=late))
    assert len(late.asked) == 2 and len(checked) == 1


def test_what_ifs_are_compared_with_what_was_planned() -> None:
    """What a dry run counted of the best is not known of its changes."""
    rehearsals = Rehearsals(lambda number, found: DryRun(1e9, 2e9, {"weights": 1e9}))
    plan, before = make_plan(replace(QUESTION, rehearse=rehearsals)), make_plan(QUESTION)
    assert plan.best is not None and before.best is not None
    assert plan.best.estimate.choice == before.best.estimate.choice
    assert plan.best.estimate.peak_bytes != before.best.estimate.peak_bytes
    assert plan.what_ifs == before.what_ifs


def test_estimates_are_the_planners_but_for_what_was_corrected() -> None:
    estimates, profile = CorrectedEstimates(), QUESTION.make_profile(4096, "bfloat16")
    first, second = leading(2)
    known = replace(estimate(profile, QUESTION.cluster, first), fault="x")
    estimates.known[first] = known
    assert estimates.estimate(profile, QUESTION.cluster, first) is known
    assert estimates.fit(profile, QUESTION.cluster, first) is known
    assert estimates.estimate(profile, QUESTION.cluster, second) == estimate(profile, QUESTION.cluster, second)
    assert estimates.fit(profile, QUESTION.cluster, second) == room_of(profile, QUESTION.cluster, second)
