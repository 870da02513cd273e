"""What ranks are fed and how they drop, beyond the cases of test_judge."""

from allranks.verifying.judge import judge
from allranks.verifying.recording import Draw, RunRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import evidence

TENSOR_WORLD = WorldView((0, 0), {"tp": 2})


def alike(ranks: list[RunRecord]) -> None:
    for run in ranks:
        for step, rows in zip(run.steps, ([0, 1, 2, 3], [4, 5, 6, 7]), strict=True):
            step.rows, step.draws = list(rows), []


def drops(run: RunRecord) -> None:
    run.steps[0].draws = [Draw(1, (4, 8), False)]


def with_draws(first: Draw, second: Draw, world: WorldView = TENSOR_WORLD) -> list[str]:
    def change(ranks: list[RunRecord]) -> None:
        alike(ranks)
        ranks[0].steps[0].draws, ranks[1].steps[0].draws = [first], [second]

    return [finding.verdict.kind for finding in judge(evidence(change, drops, world))]


def test_ranks_of_one_layer_drop_alike_what_is_whole_and_otherwise_what_is_cut() -> None:
    whole, cut = (2, 8), (4, 4)
    assert with_draws(Draw(1, whole, False), Draw(1, whole, False)) == []
    assert with_draws(Draw(1, whole, False), Draw(2, whole, False)) == ["S7"]
    assert with_draws(Draw(1, cut, False), Draw(2, cut, False)) == []
    assert with_draws(Draw(1, cut, False), Draw(1, cut, False)) == ["S7"]


def test_ranks_of_two_stages_drop_for_themselves() -> None:
    """A stage calls what is before it and has no parameters, too, on values that nobody takes."""
    assert with_draws(Draw(1, (2, 8), False), Draw(2, (2, 8), False), WorldView((0, 0), {"pp": 2})) == []


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
