"""What ranks are fed, beyond the cases of test_judge."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from allranks.stepping.feeding import SEEDED
from allranks.verifying.data_causes import UNPADDED, WHOLE, judge_fed, judge_samples
from allranks.verifying.evidence import Evidence
from allranks.verifying.judge import judge
from allranks.verifying.recording import OneDevice, Part, RunRecord, StepRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import evidence, scale

COPIES = WorldView((0, 1, 2, 3), {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.parametrize(
    ("rows", "axis"), [(([0, 1], [2, 3]) * 2, "dp_replicate"), (([0, 1], [0, 1], [2, 3], [2, 3]), "dp_shard")]
)
def test_samples_fed_twice_along_one_axis_of_two(rows: Sequence[list[int]], axis: str) -> None:
    ranks = [RunRecord(steps=[StepRecord(rows=some)]) for some in rows]
    (finding,) = judge_samples(replace(evidence(), ranks=ranks, world=COPIES), 0)
    assert (finding.verdict.kind, finding.axis) == ("S4", axis)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (([4, 6], [5, 0]), "S2"),  # as DistributedSampler repeats the first of its order
        (([4, 6], [5, 6]), "S4"),
        (([4, 6], [5, 9]), "S24"),  # a sample of a later step
        (([4, 6, 0], [5, 1, 2]), "S24"),  # more than fills up the ranks
        (([4], [5, 0]), "other"),  # one is missing
    ],
)
def test_samples_that_fill_up_the_ranks_come_twice(rows: Sequence[list[int]], kind: str) -> None:
    alone = RunRecord(steps=[StepRecord(rows=some) for some in ([0, 1, 2, 3], [4, 5, 6], [9])])
    first = ([0, 2], [1, 3])
    ranks = [RunRecord(steps=[StepRecord(rows=a), StepRecord(rows=b)]) for a, b in zip(first, rows, strict=True)]
    (finding,) = judge_samples(Evidence(OneDevice(alone), ranks, WorldView((0, 1), {"dp": 2})), 1)
    assert finding.verdict.kind == kind, finding.verdict
    assert (finding.verdict.next == UNPADDED) == (kind == "S2")


@pytest.mark.parametrize(
    ("due", "rows", "kind"),
    [
        ([0, 1, 2, 3], ([0, 1, 2], [2, 3]), "S4"),  # 2 ranks divide 4: no sampler repeats one
        ([0, 1, 2, 3, 4], ([0, 1, 2], [1, 3, 4]), "S2"),
        ([0, 1, 2, 3, 4], ([0, 1], [1, 2, 3, 4]), "S4"),  # nor are shares of which one is longer filled up
        ([0, 1, 2, 3], ([0, 1, 2, 2], [3]), "S24"),
    ],
)
def test_shares_that_overlap_are_not_filled_up(due: list[int], rows: Sequence[list[int]], kind: str) -> None:
    ranks = [RunRecord(steps=[StepRecord(rows=some)]) for some in rows]
    alone = OneDevice(RunRecord(steps=[StepRecord(rows=due)]))
    (finding,) = judge_samples(Evidence(alone, ranks, WorldView((0, 1), {"dp": 2})), 0)
    assert finding.verdict.kind == kind, finding.verdict
    if kind == "S4":
        assert any("1 of rank 0's" in line for line in finding.verdict.evidence), finding.verdict


def test_of_samples_fed_to_several_ranks_those_are_told_that_share_the_most() -> None:
    ranks = [RunRecord(steps=[StepRecord(rows=some)]) for some in ([0, 1, 2], [2, 3, 4], [5])]
    alone = OneDevice(RunRecord(steps=[StepRecord(rows=[*range(6)])]))
    (finding,) = judge_samples(Evidence(alone, ranks, WorldView((0, 1, 2), {"dp": 3})), 0)
    assert "1 of rank 0's 3 samples are also rank 1's" in finding.verdict.evidence


def test_parts_of_a_packed_batch_are_other_batches_of_which_nothing_is_said() -> None:
    """But where two ranks are fed the same one."""
    one, world = RunRecord(steps=[StepRecord(rows=[7], packed=True)]), WorldView((0, 1), {"dp": 2})

    def judged(first: int, second: int, packed: bool = True) -> list[str]:
        ranks = [RunRecord(steps=[StepRecord(rows=[row], packed=packed)]) for row in (first, second)]
        return [finding.verdict.kind for finding in judge_samples(Evidence(OneDevice(one), ranks, world), 0)]

    assert judged(8, 9) == []
    assert judged(7, 7) == ["S4"]
    one.steps[0].packed = False
    assert judged(8, 9, packed=False) == ["other"]


def test_a_model_of_one_number_does_not_tell_that_samples_are_the_same() -> None:
    """Its gradient is a multiple of any other."""

    def judged(size: int, factor: float) -> list[str]:
        def only(run: RunRecord, by: float) -> None:
            for what in ("raw", "gradients"):
                value = getattr(run.steps[0], what)["bias"].value[:size] * by
                setattr(run.steps[0], what, {"bias": Part(None, value)})

        def change(ranks: list[RunRecord]) -> None:
            for rank, run in enumerate(ranks):
                run.steps[0].rows = [50 + rank, 60 + rank]
                only(run, factor)

        return [f.verdict.kind for f in judge_fed(evidence(change, lambda run: only(run, 1.0)), 0)]

    assert judged(1, 1.0) == judged(3, 1.0) == judged(3, 1.5) == []
    assert judged(1, 1.5) == judged(3, 0.0) == ["other"]


def test_an_epoch_that_begins_anew_in_the_same_order() -> None:
    def change(ranks: list[RunRecord]) -> None:
        ranks[0].steps[1].rows, ranks[1].steps[1].rows = [0, 1], [2, 3]

    (finding,) = judge(evidence(change))
    assert (finding.verdict.kind, finding.step) == ("S1", 1)


def test_data_that_ends_too_soon() -> None:
    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            del run.steps[1]

    assert [finding.verdict.kind for finding in judge(evidence(change))] == ["S3"]


def with_values(fed: dict[int, int], shape: int = 1, *, gradients: bool = True) -> list[tuple[str, str]]:
    """(kind, next) where rows 0 to 7 have the values 10 to 17 on one device, and on the ranks those of `fed`."""

    def values(rows: Sequence[int], other: dict[int, int]) -> dict[int, tuple[int, int]]:
        return {row: (shape if row in other else 1, other.get(row, row + 10)) for row in rows}

    def change(ranks: list[RunRecord]) -> None:
        for run in ranks:
            for step in run.steps:
                step.values = values(step.rows, fed)
            if gradients:
                scale(run.steps[0].raw, 1.5)

    def alone(run: RunRecord) -> None:
        for step in run.steps:
            step.values = values(step.rows, {})

    return [(finding.verdict.kind, finding.verdict.next) for finding in judge(evidence(change, alone))]


def test_values_of_a_tasks_samples_explain_gradients_that_differ() -> None:
    assert with_values({0: 99, 3: 98}) == [("S5", SEEDED)]
    assert with_values({2: 10}) == [("S4", WHOLE)], "rank 1 is fed what rank 0 is"
    assert with_values({0: 16, 2: 17}) == [("S3", WHOLE)], "values of the next step, and nobody has the own ones"
    assert with_values({0: 99}, gradients=False) == [], "no forward reads them"
    assert with_values({0: 99}, shape=2) == with_values({}) != [], "filled up to another length"
