"""From records to findings: nothing for what is equal, and for each injected difference its kind, step and factor."""

import json
import math
from collections.abc import Callable, Sequence

import pytest
import torch

from allranks.verifying.evidence import Evidence
from allranks.verifying.findings import OTHER, Finding
from allranks.verifying.judge import judge, judge_ranks
from allranks.verifying.recording import Draw, OneDevice, Part, RunRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import evidence, one_device, scale, two_ranks

Change = Callable[[list[RunRecord]], object]


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [finding.verdict.kind for finding in findings]


def test_equal_records_give_no_finding() -> None:
    assert judge(evidence()) == []


def each(
    ranks: list[RunRecord], what: str, factor: float, step: int = 0, names: Sequence[str] = ("weight", "bias")
) -> None:
    for run in ranks:
        scale(getattr(run.steps[step], what), factor, names)


def own(ranks: list[RunRecord]) -> None:
    for what in ("raw", "gradients"):
        scale(getattr(ranks[0].steps[0], what), 1.5)
        scale(getattr(ranks[1].steps[0], what), 0.5)


def past(ranks: list[RunRecord]) -> None:
    """The same, where nobody has called the wrapper."""
    own(ranks)
    for run in ranks:
        run.steps[0].past = ("",)


def past_in_micro_batches(ranks: list[RunRecord]) -> None:
    past(ranks)
    for run in ranks:
        run.steps[0].batch_sizes = (1, 1)


def clipped_first(ranks: list[RunRecord]) -> None:
    scale(ranks[0].steps[0].raw, 1.5)
    scale(ranks[1].steps[0].raw, 0.5)
    each(ranks, "gradients", 0.9)


def apart_of_a_task(ranks: list[RunRecord]) -> None:
    own(ranks)
    for run in ranks:
        for step in run.steps:
            step.gradients = {}  # a Task's are looked at before clipping only


def settings(key: str, value: float, first: int = 0) -> Change:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            for step in run.steps[first:]:
                step.settings = [{**step.settings[0], key: value}]

    return change


def paced(ranks: list[RunRecord]) -> None:
    settings("lr", 0.13)(ranks)
    settings("lr", 0.17, 1)(ranks)


def still(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.steps[0].parameters["bias"] = run.start.parameters["bias"]


def lone(ranks: list[RunRecord]) -> None:
    value = ranks[1].steps[1].parameters["weight"].value.clone()
    value[0, 0] += 1e-3
    ranks[1].steps[1].parameters["weight"] = Part(None, value)


def rows(first: list[int], second: list[int]) -> Change:
    def change(ranks: list[RunRecord]) -> None:
        ranks[0].steps[0].rows, ranks[1].steps[0].rows = first, second

    return change


def other_samples(ranks: list[RunRecord]) -> None:
    rows([0, 1], [2, 50])(ranks)
    by_no_factor(ranks, 0)


def by_no_factor(ranks: list[RunRecord], step: int) -> None:
    """Gradients of other samples: alike on all ranks."""
    for run in ranks:
        for what in ("raw", "gradients"):
            parts = getattr(run.steps[step], what)
            parts |= {name: Part(None, part.value**2 + 0.1) for name, part in parts.items()}


def numbered(change: Change) -> Change:
    """Samples that are numbered anew in their batch, and what is wrong besides."""

    def both(ranks: list[RunRecord]) -> None:
        drawn(ranks)
        change(ranks)
        for step in range(2):
            for rank, run in enumerate(ranks):
                run.steps[step].rows = [900 + 10 * step + rank, 950 + 10 * step + rank]

    return both


def draws(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.steps[0].draws = [Draw(7, (2, 4), False, probability=0.5)]


def drawn_again(ranks: list[RunRecord]) -> None:
    ranks[0].steps[1].draws.append(Draw(99, (2, 4), True))


def seeds(ranks: list[RunRecord]) -> None:
    """All ranks draw from one state, for samples that one device does not have."""
    drawn(ranks)
    ranks[1].steps[1].rows = [60, 70]
    by_no_factor(ranks, 1)


def drawn(ranks: list[RunRecord]) -> None:
    for run in ranks:
        for step in run.steps:
            step.drew = (False, True, False)


def told(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.steps[0].loss = 1.0


def evaluated(values: list[int]) -> Change:
    def change(ranks: list[RunRecord]) -> None:
        ranks[1].evaluated = values
        for run in ranks:
            run.evaluation = {"accuracy": 0.6}

    return change


CASES: dict[str, tuple[Change, str, int | None, str | float]] = {
    "no synchronisation at all": (own, "S11", 0, ""),
    "apart, of a Task": (apart_of_a_task, "S11", 0, ""),
    "past the wrapper": (past, "S10", 0, ""),
    "past the wrapper in every micro-batch": (past_in_micro_batches, "S10", 0, ""),
    "clipped before the sum": (clipped_first, "S13", 0, ""),
    "divided by too few ranks": (lambda r: each(r, "raw", 2.0), "S9", 0, "data ranks = 2"),
    "divided once too often": (lambda r: each(r, "raw", 0.5), "S9", 0, "1/data ranks = 1/2"),
    "one part in a billion": (lambda r: each(r, "raw", 1 + 1e-9, 1, ["weight"]), "S16", 1, 1.000000001),
    "clipped by another norm": (lambda r: each(r, "gradients", 0.7), "S13", 0, 0.7),
    "learning rate from the first step on": (settings("lr", 0.2), "S23", 0, "data ranks = 2"),
    "learning rate later": (settings("lr", 0.05, 1), "S22", 1, "1/data ranks = 1/2"),
    "learning rate at another pace from the first step on": (paced, "S22", 0, 1.3),
    "another weight decay": (settings("weight_decay", 0.0), "S38", 0, 0.0),
    "not updated": (still, "S12", 0, ""),
    "one rank alone": (lone, "S39", 1, ""),
    "the same samples": (rows([0, 1], [0, 1]), "S4", 0, ""),
    "a sample too few": (rows([0, 1], [2]), "S24", 0, 0.75),
    "other samples": (other_samples, "other", 0, ""),
    "the same dropouts": (draws, "S6", 0, ""),
    "recomputed with other dropouts": (drawn_again, "S34", 1, ""),
    "a loss of its own": (told, "S30", 0, "1/data ranks = 1/2"),
    "a metric of its own": (evaluated([101, 103]), "S30", None, 0.8),
    "evaluated twice": (evaluated([101, 103, 100]), "S2", None, ""),
    "evaluated by nobody": (evaluated([101]), "S3", None, ""),
}


def test_samples_that_differ_by_what_nothing_computes_with_are_the_same() -> None:
    """As those of graphs do that are numbered in their batch: the gradients are those of one device."""
    assert judge(evidence(rows([0, 1], [2, 50]))) == []
    assert judge(evidence(numbered(lambda ranks: None))) == [], "nor are they drawn alike for other samples"


def apart_later(ranks: list[RunRecord]) -> None:
    """Not synchronised, so that in the next step gradients are those of other parameters."""
    own(ranks)
    by_no_factor(ranks, 1)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (own, "S11"),
        (past, "S10"),
        (apart_later, "S11"),
        (clipped_first, "S13"),
        (lambda r: each(r, "raw", 2.0), "S9"),
        (lambda r: each(r, "gradients", 0.7), "S13"),
        (settings("lr", 0.2), "S23"),
        (lambda r: by_no_factor(r, 0), OTHER),
    ],
)
def test_what_is_wrong_beside_such_samples_is_named_first(change: Change, kind: str) -> None:
    """Where ranks part in their gradients, or have one factor: other samples do not make that."""
    findings = judge(evidence(numbered(change)))
    assert kinds(findings) == ([kind] if kind != OTHER else [OTHER, "S5"]), [str(f.verdict) for f in findings]
    fed = "the ranks are fed other samples than one device"
    said = "\n".join([findings[0].verdict.what, *findings[0].verdict.evidence])
    assert (fed in said) == (kind != "S23") and (fed in findings[0].verdict.what) == (kind == OTHER)


@pytest.mark.parametrize("name", CASES)
def test_each_difference_is_found_and_named(name: str) -> None:
    change, kind, step, factor = CASES[name]
    findings = judge(evidence(change))
    assert kinds(findings) == [kind], [str(finding.verdict) for finding in findings]
    assert (findings[0].step, findings[0].factor) == (step, factor)


def test_what_follows_from_a_difference_is_no_finding_of_its_own() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for step in (0, 1):
            each(ranks, "raw", 2.0, step)
            each(ranks, "parameters", 3.0, step)

    (finding,) = judge(evidence(change))
    assert (finding.verdict.kind, finding.step) == ("S9", 0)


def test_the_norm_is_judged_before_clipping() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].norm = 3.0 * 2**0.5

    (finding,) = judge(evidence(change))
    assert (finding.verdict.kind, finding.factor) == ("S13", "data ranks = 2")


def test_skipped_updates_and_buffers() -> None:
    def skipped(ranks: list[RunRecord]) -> None:
        ranks[1].steps[0].updates = 0

    def statistics(ranks: list[RunRecord]) -> None:
        ranks[1].steps[0].buffers["mean"] = Part(None, torch.tensor([5.0, 2.0], dtype=torch.float64))

    assert kinds(judge(evidence(skipped))) == ["S28"]
    assert kinds(judge(evidence(statistics))) == ["S25"]


def test_buffers_on_the_grid_of_bfloat16_were_rounded() -> None:
    def alone(run: RunRecord) -> None:
        run.steps[0].buffers["mean"] = Part(None, torch.tensor([1.001, 2.0], dtype=torch.float64))

    def mean(value: float) -> Change:
        def change(ranks: list[RunRecord]) -> None:
            for run in ranks:
                run.steps[0].buffers["mean"] = Part(None, torch.tensor([value, 2.0], dtype=torch.float64))

        return change

    assert kinds(judge(evidence(mean(1.0), alone))) == ["S26"]
    assert kinds(judge(evidence(mean(1.1), alone))) == ["S25"]


def test_augmentation_alike_is_told_where_samples_are_not_those_of_one_device() -> None:
    assert kinds(judge(evidence(seeds))) == [OTHER, "S5"]
    assert judge(evidence(drawn)) == [], "each draws for all, and takes its own part"


def test_ranks_are_judged_without_one_device() -> None:
    def all_of_it(ranks: list[RunRecord]) -> None:
        draws(ranks)
        seeds(ranks)
        ranks[1].repeated_epochs = [3]

    findings = judge_ranks(evidence(all_of_it))
    assert kinds(findings) == ["S1", "S5", "S6"]
    assert "has begun epoch 3 again" in str(findings[0].verdict)
    assert judge_ranks(evidence()) == []


def test_ranks_that_report_their_own_share_of_the_loss_are_right() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].loss = 1.5 if run is ranks[0] else 2.5

    assert judge(evidence(change)) == []


def test_ranks_that_report_their_share_of_a_sum_are_not_right() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].loss = 0.75 if run is ranks[0] else 1.25

    assert kinds(judge(evidence(change))) == ["S30"]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((2.0, None), []),  # the world's, by one
        ((10.0, None), ["S30"]),
        ((None, 10.0), ["S30"]),
        ((1.5, None), ["S30"]),  # rank 0's own samples' alone: no mean of the ranks'
        ((math.inf, None), ["S30"]),
        ((None, None), []),
    ],
)
def test_the_ranks_that_report_a_loss_are_compared(losses: Sequence[float | None], expected: list[str]) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run, loss in zip(ranks, losses, strict=True):
            run.steps[0].loss = loss

    findings = judge(evidence(change))
    assert kinds(findings) == expected
    for finding in findings:
        assert "alone" in finding.verdict.evidence[0] and "each rank's own loss" in finding.verdict.next


def test_of_ranks_that_share_samples_one_may_report_their_loss() -> None:
    def losses(*told: float | None) -> list[str]:
        one, ranks = one_device(), [*two_ranks(), *two_ranks()]  # samples of rank 0 are those of rank 2
        for run, loss in zip(ranks, told, strict=True):
            run.steps[0].loss = loss
        world = WorldView((0, 1, 0, 1), {"dp": 2, "model": 2})
        return kinds(judge(Evidence(OneDevice(one, [one]), ranks, world)))

    assert losses(1.5, 2.5, None, None) == losses(1.5, None, None, 2.5) == []
    assert losses(1.5, None, 2.5, None) == losses(1.5, 2.5, None, 2.5) == ["S30"]


def test_a_rank_without_samples_reports_none() -> None:
    one, ranks = one_device(), [*two_ranks(), two_ranks()[0]]
    for run, loss in zip(ranks, (1.5, 2.5, None), strict=True):
        run.steps[0].loss = loss
    for step in ranks[2].steps:
        step.rows, step.draws = [], []
    assert judge(Evidence(OneDevice(one, [one]), ranks, WorldView((0, 1, 2), {"dp": 3}))) == []


def infinite_loss(ranks: list[RunRecord]) -> None:
    ranks[0].steps[0].loss = math.inf


def infinite_metric(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.evaluation = {"accuracy": math.inf}


def norms(value: float) -> Change:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].norm = value

    return change


@pytest.mark.parametrize("change", [infinite_loss, infinite_metric, norms(math.inf), norms(1e200), norms(math.nan)])
def test_what_is_infinite_is_a_finding_that_json_can_hold(change: Change) -> None:
    (finding,) = judge(evidence(change))
    assert finding.factor == "" and json.dumps(finding.to_json(), allow_nan=False)
