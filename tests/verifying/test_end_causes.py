"""What differs after a load, by what the same rank did without one."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.end_causes import judge_reshard
from allranks.verifying.judge import judge
from allranks.verifying.recording import Draw, Part, RunRecord
from tests.verifying.records import VALUES, evidence, parts, scale

Change = Callable[[RunRecord], None]


def resumed(change: Change) -> list[tuple[str, int | None]]:
    """Findings where every rank saves after step 0 and goes on, after `change` of the resumed record."""

    def resume(ranks: list[RunRecord]) -> None:
        for run in ranks:
            again = RunRecord(start=deepcopy(run.start), steps=deepcopy(run.steps[1:]))
            again.start.parameters = deepcopy(run.steps[0].parameters)
            again.start.buffers = deepcopy(run.steps[0].buffers)
            again.first, run.resumed, run.saved_before = 1, again, 1
            change(again)

    return [(finding.verdict.kind, finding.step) for finding in judge(evidence(resume))]


def permuted(run: RunRecord) -> None:
    run.start.parameters["weight"] = Part(None, run.start.parameters["weight"].value[[1, 0, 2]])


def permuted_over_tensors(run: RunRecord) -> None:
    first, second = run.start.parameters["weight"].value.clone(), run.start.parameters["bias"].value.clone()
    first[0, 0], second[0] = float(second[0]), float(first[0, 0])
    run.start.parameters = {"weight": Part(None, first), "bias": Part(None, second)}


def lost_row(run: RunRecord) -> None:
    value = run.start.parameters["weight"].value.clone()
    value[2] = 0
    run.start.parameters["weight"] = Part(None, value)


def from_the_start(run: RunRecord) -> None:
    run.start.parameters = {name: Part(None, value) for name, value in VALUES.items()}


def rate(run: RunRecord) -> None:
    run.steps[0].settings = [{"lr": 0.3}]


def state(run: RunRecord) -> None:
    run.steps[0].state = {}


def drops(run: RunRecord) -> None:
    run.steps[0].draws = [Draw(424242, (2, 4), False)]


def rows(run: RunRecord) -> None:
    run.steps[0].rows = [0, 1]


def ends(run: RunRecord) -> None:
    run.steps = []


def untied(run: RunRecord) -> None:
    scale(run.steps[0].parameters, 1.001)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: None, []),
        (permuted, [("S18", 1)]),
        (permuted_over_tensors, [("S18", 1)]),
        (lost_row, [("S19", 1)]),
        (from_the_start, [("S40", 1)]),
        (rate, [("S17", 1)]),
        (state, [("S17", 1)]),
        (untied, [("S17", 1)]),
        (drops, [("S21", 1)]),
        (rows, [("S20", 1)]),
        (ends, [("S20", 1)]),
        (lambda run: scale(run.start.buffers, 0.0, ["mean"]), [("S17", 1)]),
    ],
)
def test_resumes(change: Change, expected: list[tuple[str, int]]) -> None:
    assert resumed(change) == expected


def resumed_twice(change: Change) -> list[tuple[str, str]]:
    """(kind, what) of findings where every rank has a third step, and saves before the second and before the third."""

    def third(run: RunRecord) -> None:
        run.steps.append(deepcopy(run.steps[1]))
        run.steps[2].parameters = parts(3.5)

    def resume(ranks: list[RunRecord]) -> None:
        for run in ranks:
            third(run)
            saved = run
            for first in (1, 2):
                again = RunRecord(start=deepcopy(run.start), steps=deepcopy(run.steps[first:]), first=first)
                again.start.parameters = deepcopy(run.steps[first - 1].parameters)
                again.start.buffers = deepcopy(run.steps[first - 1].buffers)
                saved.resumed, saved.saved_before, saved = again, first, again
            change(saved)

    return [(finding.verdict.kind, finding.verdict.what) for finding in judge(evidence(resume, third))]


def the_older_save(run: RunRecord) -> None:
    run.start.parameters = parts(1.5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (rows, [("S20", "after the second load step 2 is fed other samples on rank 0")]),
        (drops, [("S21", "after the second load step 2 drops other units on rank 0")]),
        (ends, [("S20", "after the second load the data ends before step 2")]),
        (the_older_save, [("S40", "after the second load the run stands before step 1, not before step 2")]),
        (lambda run: scale(run.start.buffers, 0.0, ["mean"]), [("S17", "after the second load buffers differ")]),
        (lambda run: None, []),
    ],
)
def test_a_second_resume_is_judged_as_the_first(change: Change, expected: list[tuple[str, str]]) -> None:
    told = resumed_twice(change)
    assert [kind for kind, _ in told] == [kind for kind, _ in expected]
    assert all(what.startswith(due) for (_, what), (_, due) in zip(told, expected, strict=True)), told


def test_a_resume_that_fails_is_a_finding() -> None:
    def fail(ranks: list[RunRecord]) -> None:
        ranks[0].resumed, ranks[1].resumed = RunRecord(error="KeyError: 'state'"), RunRecord()

    (finding,) = judge(evidence(fail))
    assert finding.verdict.evidence == ("KeyError: 'state'",)


def test_statistics_of_each_rank_show_in_the_evaluation() -> None:
    def own(ranks: list[RunRecord]) -> None:
        for run in ranks:
            run.evaluation = {"accuracy": 0.5}
            for step in run.steps[1:]:
                step.buffers["mean"] = Part(None, torch.zeros(2, dtype=torch.float64))

    def statistics(run: RunRecord) -> None:
        run.start.statistics = ["BatchNorm1d"]

    assert [finding.verdict.kind for finding in judge(evidence(own, statistics))] == ["S25"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda run: None, []),
        (permuted, ["S18"]),
        (permuted_over_tensors, ["S18"]),
        (lost_row, []),  # whether so many were meant to load it is not known
        (from_the_start, []),
        (lambda run: setattr(run, "error", "RuntimeError: saved by 2 ranks"), []),
    ],
)
def test_what_ranks_saved_loaded_on_one_process(change: Change, expected: list[str]) -> None:
    found_here = evidence()
    for rank, run in enumerate(found_here.ranks):
        # Each has a half of it by hand, the first one row and the second two.
        for record in (run.start, run.steps[0]):
            part = record.parameters["weight"].value
            record.parameters["weight"] = Part(None, part[:1] if rank == 0 else part[1:])
        run.saved_before = 1
    boxes = {("weight", 0): Box((0, 0), (1, 2)), ("weight", 1): Box((1, 0), (2, 2))}
    loaded = RunRecord(start=deepcopy(found_here.one.run.start))
    loaded.start.parameters = deepcopy(found_here.one.run.steps[0].parameters)
    change(loaded)
    findings = judge_reshard(replace(found_here, places=boxes), loaded)
    assert [(finding.verdict.kind, finding.step) for finding in findings] == [(kind, 1) for kind in expected]


@pytest.mark.parametrize("own", [True, False])
def test_noise_that_goes_on_otherwise_is_called_noise(own: bool) -> None:
    def resume(ranks: list[RunRecord]) -> None:
        for rank, run in enumerate(ranks):
            run.steps[1].draws = [Draw(rank, (2, 4), False, own=own, shared=not own)]
            again = RunRecord(start=deepcopy(run.start), steps=deepcopy(run.steps[1:]))
            again.start.parameters = deepcopy(run.steps[0].parameters)
            again.start.buffers = deepcopy(run.steps[0].buffers)
            again.steps[0].draws = [Draw(rank + 50, (2, 4), False, own=own, shared=not own)]
            run.resumed, run.saved_before = again, 1

    def alone(run: RunRecord) -> None:
        run.steps[1].draws = []

    (finding,) = judge(evidence(resume, alone))
    assert finding.verdict.kind == "S21" and "step 1 draws other noise on rank 0" in finding.verdict.what


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([{"accuracy": 0.75}, {}], []),
        ([{"accuracy": 0.75}, None], []),
        ([{}, {}], ["S30"]),
        ([{"accuracy": 0.75}, {"accuracy": math.nan}], ["S30"]),
        ([{"accuracy": 0.5}, {}], ["S30"]),
    ],
)
def test_only_ranks_that_report_are_judged(told: list[dict[str, float] | None], expected: list[str]) -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run, values in zip(ranks, told, strict=True):
            run.evaluation = values

    assert [finding.verdict.kind for finding in judge(evidence(change))] == expected
