"""Which noise is for the samples, and whether a rank goes by its own."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from allranks.verifying.answer import Answer
from allranks.verifying.findings import found
from allranks.verifying.noise_runs import does_noise_matter, is_own_noise_alike, is_single_noise_alike
from allranks.verifying.recording import Draw, OneDevice, RunRecord, StepRecord
from allranks.verifying.world_view import WorldView
from tests.verifying.records import evidence, scale

SHARED = WorldView((0, 0), {"model": 2})


def shared(state: int, shape: tuple[int, ...], *, again: bool = False) -> Draw:
    return Draw(state, shape, again, shared=True)


def test_as_many_numbers_as_samples_on_one_side_alone_are_no_noise_for_them() -> None:
    def answer(alone: Sequence[Draw], *ranks: Sequence[Draw], **more: Any) -> Answer:
        def run(rows: int, draws: Sequence[Draw]) -> RunRecord:
            return RunRecord(steps=[StepRecord(rows=[*range(rows)], draws=[*draws])])

        given = {"findings": (found("S16", "off"),), **more}
        return Answer(one=OneDevice(run(4, alone)), ranks=[run(2 if draws else 0, draws) for draws in ranks], **given)

    alone, mine, again = shared(1, (4,)), shared(2, (2,)), shared(2, (2,), again=True)
    wide = shared(3, (2, 5))
    assert is_single_noise_alike(answer([alone], [mine], [mine, again, wide], []))
    assert not is_single_noise_alike(answer([alone], [mine], [wide]))
    assert not is_single_noise_alike(answer([alone], [mine], [mine, mine]))
    assert not is_single_noise_alike(answer([], [mine], [mine]))
    assert is_single_noise_alike(answer([alone], [wide], [wide], findings=()))
    assert is_single_noise_alike(answer([alone], [wide], [wide], noise=found("S16", "off").verdict))
    assert is_single_noise_alike(Answer())


def test_noise_of_own_generators_is_counted_on_both_sides() -> None:
    def run(*own: bool) -> RunRecord:
        return RunRecord(steps=[StepRecord(draws=[Draw(1, (4, 2), False, own=some) for some in own])])

    assert is_own_noise_alike(Answer(one=OneDevice(run(True)), ranks=[run(True), run(True, False)]))
    assert not is_own_noise_alike(Answer(one=OneDevice(run(True)), ranks=[run(True), run(False)]))
    assert is_own_noise_alike(Answer(ranks=[run(True), run(True)])) and is_own_noise_alike(Answer())


@pytest.mark.parametrize(("moved_by", "matters"), [({0, 1}, True), ({0}, False), ({1}, False), (set(), False)])
def test_a_rank_goes_by_its_own_noise_where_other_noise_of_any_moves_it(moved_by: set[int], matters: bool) -> None:
    both = evidence(world=SHARED)
    tried = []

    def run(salted: frozenset[int]) -> list[RunRecord]:
        tried.append(set(salted))
        again = deepcopy([*both.ranks])
        if salted & moved_by:
            scale(again[1].steps[1].gradients, 1.01)
        return again

    assert does_noise_matter(run, both) == matters
    assert tried == [{1}, {0}][: 2 if 1 in moved_by else 1]


def test_a_run_that_fails_tells_nothing() -> None:
    def run(salted: frozenset[int]) -> list[RunRecord]:
        raise RuntimeError("rank 1: ...")

    assert not does_noise_matter(run, evidence(world=SHARED))
