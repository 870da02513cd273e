"""Causes of wrong updates, beyond the cases of test_judge: no gradient for a gradient of zero, tied tensors."""

import pytest
import torch

from allranks.verifying.judge import judge
from allranks.verifying.recording import Part, RunRecord
from tests.verifying.records import evidence


def moved(ranks: list[RunRecord]) -> None:
    for run in ranks:
        run.steps[0].parameters["bias"] = Part(None, run.steps[0].parameters["bias"].value * 0.9)


def test_no_gradient_for_a_gradient_of_zero() -> None:
    def unused(run: RunRecord) -> None:
        for step in run.steps:
            del step.raw["bias"], step.gradients["bias"]

    def change(ranks: list[RunRecord]) -> None:
        moved(ranks)
        for run in ranks:
            for step in run.steps:
                zero = Part(None, torch.zeros(3, dtype=torch.float64))
                step.raw["bias"] = step.gradients["bias"] = zero

    (finding,) = judge(evidence(change, unused))
    assert (finding.verdict.kind, finding.tensor) == ("S35", "bias")


def test_tied_tensors_that_part_in_the_update() -> None:
    (finding,) = judge(evidence(moved, lambda run: run.start.tied.append(("bias", "other"))))
    assert (finding.verdict.kind, finding.step) == ("S14", 0)


def test_what_nothing_explains_says_so() -> None:
    (finding,) = judge(evidence(moved))
    assert finding.verdict.kind == "other" and "param_groups" in finding.verdict.next


def test_another_number_of_updates_everywhere() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.steps[0].updates = 2

    assert [finding.verdict.kind for finding in judge(evidence(change))] == ["S22"]


def groups(*betas: float) -> list[dict[str, float]]:
    return [{"lr": 0.1, "betas.1": beta} for beta in betas]


def test_all_groups_are_compared_where_there_are_as_many() -> None:
    def alone(run: RunRecord) -> None:
        for step in run.steps:
            step.settings = groups(0.99, 0.95)

    def given(*betas: float) -> list[tuple[str, str]]:
        def change(ranks: list[RunRecord]) -> None:
            for run in ranks:
                for step in run.steps:
                    step.settings = groups(*betas)

        return [(f.verdict.kind, f.verdict.what.partition(" is ")[0]) for f in judge(evidence(change, alone))]

    assert given(0.99, 0.95) == []
    assert given(0.99, 0.9) == [("S38", "step 0: betas.1 of group 1")]
    assert given(0.99) == [], "a stage of a pipeline may lack one"
    assert given(0.9) == [("S38", "step 0: betas.1 of group 0")]


@pytest.mark.parametrize(
    ("one", "ranks", "kind"),
    [
        ((1.0, 2.0), (0.5, 0.7), "S28"),
        ((1.0, 2.0), (1.0, 0.7), "S28"),
        ((1.0, 2.0), (0.5, 0.5), "S38"),  # alike on all: nothing that a rank has found by itself
        ((1.0, 1.0), (0.5, 0.7), "S38"),  # and what stands still was asked for
    ],
)
def test_a_number_that_moves_by_itself_and_is_each_ranks_own_is_state(
    one: tuple[float, float], ranks: tuple[float, float], kind: str
) -> None:
    def told(run: RunRecord, *limits: float) -> None:
        for step, limit in zip(run.steps, limits, strict=True):
            step.settings = [{"lr": 0.1, "limit": limit}]

    def change(runs: list[RunRecord]) -> None:
        for run, limit in zip(runs, ranks, strict=True):
            told(run, limit, one[1])

    (finding,) = judge(evidence(change, lambda run: told(run, *one)))
    assert (finding.verdict.kind, finding.step) == (kind, 0)
    assert finding.verdict.what.startswith("step 0: limit of group 0 is")
    both = f"the ranks have {ranks[0]:.6g}, {ranks[1]:.6g}"
    assert (both in finding.verdict.evidence[0]) == (kind == "S28") == ("agree on limit" in finding.verdict.next)


@pytest.mark.parametrize(
    ("rates", "positions", "size", "kinds"),
    [
        ((0.1, 0.1), (1.0, 2.0), 100.0, []),
        ((0.1, 0.1), (2.0, 4.0), 100.0, ["S22"]),
        ((0.1, 0.1), (0.0, 0.0), 100.0, ["S22"]),
        ((0.1, 0.1), (2.0, 4.0), 200.0, []),  # as much longer
        ((0.1, 0.05), (2.0, 4.0), 100.0, []),  # a function that nobody sees may be as much longer
    ],
)
def test_a_schedule_that_has_not_moved_is_known_by_where_it_stands(
    rates: tuple[float, float], positions: tuple[float, float], size: float, kinds: list[str]
) -> None:
    def told(run: RunRecord, positions: tuple[float, float], size: float) -> None:
        for step, rate, position in zip(run.steps, rates, positions, strict=True):
            numbers = {"last_epoch": position, "step_size": size, "rates": [rate]}
            step.state |= {f"StepLR.{key}": Part(None, torch.tensor(value)) for key, value in numbers.items()}

    findings = judge(evidence(lambda runs: told(runs[1], positions, size), lambda run: told(run, (1.0, 2.0), 100.0)))
    assert [finding.verdict.kind for finding in findings] == kinds
    assert all("StepLR stands at" in f.verdict.what and "on rank 1, on one" in f.verdict.what for f in findings)


def test_adam_has_no_cause_of_its_own() -> None:
    def adam(run: RunRecord) -> None:
        run.start.optimizers = ["Adam"]

    def change(ranks: list[RunRecord]) -> None:
        moved(ranks)
        for run in ranks:
            adam(run)

    (finding,) = judge(evidence(change, adam))
    assert finding.verdict.kind == "other" and "param_groups" in finding.verdict.next
