"""The best few of a plan are rehearsed, and the plan is made again with what that counted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from allranks.plan import Choice, Estimate
from allranks.planning import checking
from allranks.planning.answer import make_plan, plan_gpus, plan_seq
from allranks.planning.checking import FEW, CorrectedEstimates, search_checked
from allranks.planning.dry_run import DryRun
from allranks.planning.estimate import estimate
from allranks.planning.question import Question
from allranks.planning.room import USABLE, room_of
from allranks.planning.search import Search, front
from tests.planning.profiles import decoder
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


def nearly() -> Question:
    """A question to which nothing fits as planned: by its margins alone, the nearest misses the memory by a percent."""
    cluster = QUESTION.cluster
    question = replace(QUESTION, micro_batch=1)
    small = question.on(replace(cluster, device=replace(cluster.device, memory_bytes=12e9)))
    nearest = Search(small.space()).run().nearest
    assert nearest is not None
    size = 1.02 * nearest.memory.total / USABLE
    return question.on(replace(cluster, device=replace(cluster.device, memory_bytes=size)))


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


def test_what_comes_nearest_may_fit_after_all() -> None:
    rehearsals = Rehearsals(lambda number, found: as_planned(found))
    question = nearly()
    before, plan = make_plan(question), make_plan(replace(question, rehearse=rehearsals))
    assert before.best is None and before.closest is not None and before.closest.estimate.may_fit
    assert rehearsals.asked == [before.closest.estimate.choice]
    assert [one.outcome for one in plan.checked] == ["stands"] and plan.closest is None
    assert plan.best is not None and plan.best.estimate is plan.checked[0].corrected


def test_where_the_nearest_does_not_fit_either_the_answer_says_that_it_was_checked() -> None:
    rehearsals = Rehearsals(lambda number, found: replace(as_planned(found), peak_bytes=1.02 * found.memory.total))
    plan = make_plan(replace(nearly(), rehearse=rehearsals))
    assert plan.best is None and plan.closest is not None
    assert [one.outcome for one in plan.checked] == ["dropped"] * len(rehearsals.asked)
    there = next(one for one in plan.checked if one.planned.choice == plan.closest.estimate.choice)
    assert there.corrected is plan.closest.estimate
    assert plan.closest.because.endswith("; a dry run has counted that")
    assert all(one.estimate is not plan.closest.estimate or one.family for one in plan.others)
    assert plan.offloaded is not None and "--check has not rehearsed it" in plan.offloaded.because


def test_of_what_is_far_from_fitting_only_a_few_are_rehearsed() -> None:
    """Each gives way to the next nearest; one that would fail gives way, too, however little memory it takes."""
    rehearsals = Rehearsals(
        lambda number, found: DryRun(fault="x") if number == 0 else replace(as_planned(found), peak_bytes=1e12)
    )
    plan = make_plan(replace(nearly(), rehearse=rehearsals))
    assert len(set(rehearsals.asked)) == len(rehearsals.asked) == FEW and plan.best is None
    assert plan.closest is not None and plan.closest.estimate.choice not in rehearsals.asked
    assert "counted" not in plan.closest.because and "would fail" not in plan.closest.because


def test_what_was_counted_of_one_says_nothing_of_those_beside_it() -> None:
    """It needs the least as planned, and the search goes no further where that alone is far too large."""
    rehearsals = Rehearsals(lambda number, found: replace(as_planned(found), peak_bytes=1e12))
    search_checked(replace(nearly(), rehearse=rehearsals))
    first, second, *_ = rehearsals.asked
    assert first.layout.recompute == "full" and second.layout == replace(first.layout, recompute="selective")


def test_what_comes_nearest_and_cannot_be_rehearsed_stays_it() -> None:
    plan = make_plan(replace(nearly(), rehearse=Rehearsals(lambda number, found: "no rehearsal")))
    assert [(one.outcome, one.because) for one in plan.checked] == [("not checked", "no rehearsal")]
    assert plan.closest is not None and plan.closest.estimate == plan.checked[0].planned
    assert plan.closest.because.startswith("is not sure to fit") and "dry run" not in plan.closest.because


@pytest.mark.parametrize("question", [nearly(), QUESTION])
def test_that_nothing_was_rehearsed_is_said(question: Question) -> None:
    plan = make_plan(replace(question, rehearse=Rehearsals(lambda number, found: None)))
    (note,) = (note for note in plan.notes if "--check " in note)
    assert plan.checked == () and note.startswith("--check has rehearsed nothing, because its time was up, or")
    assert not any("--check " in note for note in make_plan(question).notes)


def test_that_nothing_was_left_to_rehearse_is_said() -> None:
    profile = decoder(layers=3, tensor_parallel=False, context_parallel=False)
    asked = ask(batch=1, where="1x7:a100-80g", rehearse=Rehearsals(lambda number, found: as_planned(found)))
    plan = make_plan(replace(asked, make_profile=lambda seq, precision: profile))
    assert plan.leading is None and plan.checked == ()
    assert "--check has rehearsed nothing, because every layout is refused" in plan.notes


def test_what_was_searched_without_dry_runs_is_said_as_planned() -> None:
    """The number and the length are searched before any dry run, which may then say otherwise."""
    asked = Rehearsals(lambda number, found: as_planned(found))
    late = ask("llama3-8b", "1x1:a100-80g", tokens=1e12, limit_seconds=60.0, micro_batch=1)
    number = plan_gpus(replace(late, rehearse=asked))
    assert any(note.startswith("no number of devices does as planned; ") for note in number.notes)
    length = plan_seq(replace(ask("llama3-405b", "1x2:a100-80g", batch=8), rehearse=asked))
    assert "samples of 1024 positions do not fit as planned, and no longer ones" in length.notes
