"""Every epoch in the order of the one before: only where all of it is seen, and never by right."""

from collections.abc import Sequence

import pytest

from allranks.verifying.epoch_causes import judge_epochs, period_of
from allranks.verifying.evidence import Evidence
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.world_view import WorldView, view_of
from tests.verifying.records import evidence, run_of

EPOCH = ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
OTHER = ((11, 3, 5, 0), (1, 2, 9, 8), (10, 7, 6, 4))


def fed(steps: Sequence[Sequence[int]], redrawn: Sequence[int], num_ranks: int = 2) -> Evidence:
    """One device and its ranks, fed these samples in these steps, after such permutations were drawn again."""
    ranks = [run_of([rows[rank::num_ranks] for rows in steps]) for rank in range(num_ranks)]
    for run in ranks:
        run.redrawn = list(redrawn)
    return Evidence(OneDevice(run_of(steps), []), ranks, view_of(ranks))


def kinds(given: Evidence) -> list[str]:
    return [finding.verdict.kind for finding in judge_epochs(given)]


def test_samples_that_come_again_in_an_order_that_was_drawn_again() -> None:
    (finding,) = judge_epochs(fed([*EPOCH, EPOCH[0]], [12]))
    assert finding.verdict.kind == "S1" and "seed + epoch" in finding.verdict.next
    assert "a permutation of 12 is drawn again" in str(finding.verdict) and "after 3 steps" in str(finding.verdict)


def test_a_split_that_is_drawn_again_is_none_where_each_epoch_has_its_own_order() -> None:
    assert kinds(fed([*EPOCH, *OTHER], [12])) == []
    assert kinds(fed([*EPOCH, EPOCH[1]], [12])) == []


def test_what_is_not_shuffled_has_one_order_by_right() -> None:
    assert kinds(fed([*EPOCH, *EPOCH], [])) == []
    assert kinds(fed([*EPOCH, *EPOCH], [9, 40])) == []  # of other samples than those: of an evaluation, say


def test_less_than_an_epoch_tells_nothing() -> None:
    assert kinds(fed(EPOCH, [12])) == []


@pytest.mark.parametrize(
    ("steps", "length", "due"),
    [
        (EPOCH, 15, ["S1"]),  # the last batch, of three, is dropped
        (EPOCH, 16, []),
        (EPOCH, 11, ["S1"]),  # one is repeated for the second rank to have as many
        (EPOCH, 10, []),
        ((*EPOCH[:2], (8, 9)), 10, ["S1"]),
        ((*EPOCH[:2], (8, 9)), 12, []),  # a batch that is not full is not dropped: it was a split of 12, not the order
    ],
)
def test_it_has_to_be_an_order_of_as_many_samples(steps: Sequence[Sequence[int]], length: int, due: list[str]) -> None:
    assert kinds(fed([*steps, *steps], [length])) == due


def test_samples_that_are_alike_come_in_any_order_again() -> None:
    assert kinds(fed([[0, 0, 0, 0]] * 4, [4])) == []


def test_batches_without_a_row_for_each_sample_cannot_tell() -> None:
    given = fed([*EPOCH, EPOCH[0]], [12])
    given.ranks[1].steps[2].packed = True
    assert kinds(given) == []


def test_ranks_that_share_their_samples_count_once() -> None:
    ranks = [run_of([*EPOCH, EPOCH[0]]) for _ in range(2)]
    for run in ranks:
        run.redrawn = [12]
    one = OneDevice(run_of([*EPOCH, EPOCH[0]]), [])
    assert kinds(Evidence(one, ranks, WorldView((0, 0), {"tp": 2}))) == ["S1"]


def test_a_sampler_that_tells_its_epoch_needs_no_permutation() -> None:
    def change(ranks: list[RunRecord]) -> None:
        ranks[1].repeated_epochs = [3]

    (finding,) = judge_epochs(evidence(change))
    assert "has begun epoch 3 again" in str(finding.verdict)


def test_a_period_is_of_steps() -> None:
    assert period_of([*EPOCH, *EPOCH]) == 3 and period_of(EPOCH) == 0 and period_of([]) == 0
    assert period_of([EPOCH[0], EPOCH[0]]) == 1
