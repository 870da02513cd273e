"""Which noise is for the samples, and whether a rank goes by its own."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest

from allranks.parameter_map import Box
from allranks.verifying.answer import Answer
from allranks.verifying.findings import found
from allranks.verifying.noise_runs import does_noise_matter, is_own_noise_alike, least_dims_alike
from allranks.verifying.observer import NO_NOISE
from allranks.verifying.recording import Draw, OneDevice, Part, RunRecord, StepRecord
from allranks.verifying.update_state import align_settings
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
    assert least_dims_alike(answer([alone], [mine], [mine, again, wide], [])) == 1
    assert least_dims_alike(answer([alone], [mine], [wide])) == 2
    assert least_dims_alike(answer([alone], [mine], [mine, mine])) == 2
    assert least_dims_alike(answer([], [mine], [mine])) == 2
    assert least_dims_alike(answer([alone], [wide], [wide], findings=())) == 1
    assert least_dims_alike(answer([alone], [wide], [wide], noise=found("S16", "off").verdict)) == 1
    assert least_dims_alike(Answer()) == 1


def test_a_mask_of_as_many_rows_as_one_device_has_samples_is_no_noise_for_them() -> None:
    def answer(alone: set[tuple[int, ...]], *ranks: set[tuple[int, ...]]) -> Answer:
        mask = StepRecord(rows=[0, 1, 2, 3], draws=[shared(1, (4, 4))])
        runs = [RunRecord(unclaimed=shapes) for shapes in ranks]
        return Answer((found("S16", "off"),), OneDevice(RunRecord(steps=[mask], unclaimed=alone)), runs)

    assert least_dims_alike(answer(set(), {(4, 4)}, {(4, 4)})) == NO_NOISE
    assert least_dims_alike(answer({(7, 4)}, {(4, 4), (7, 4)}, set())) == NO_NOISE
    assert least_dims_alike(answer({(7, 4)}, {(7, 4)}, {(7, 4)})) == 1
    assert least_dims_alike(answer(set(), {(), (4,)}, set())) == 1, "of single numbers it is seen by their number"


def test_what_ranks_draw_for_no_samples_excuses_nothing_that_is_drawn_alike_for_each() -> None:
    """What a compression draws, say: what differs was not looked for after it."""

    def answer(shape: tuple[int, ...], drawn: tuple[int, ...] = (2, 4)) -> Answer:
        one = RunRecord(steps=[StepRecord(rows=[0, 1, 2, 3], draws=[shared(1, (4, 4))])])
        rank = RunRecord(steps=[StepRecord(rows=[0, 1], draws=[shared(1, drawn)])], unclaimed={shape})
        return Answer((found("S16", "off"),), OneDevice(one), [rank])

    assert least_dims_alike(answer((3, 5))) == 1
    assert least_dims_alike(answer((3, 4))) == NO_NOISE, "of samples, as those of one device"
    assert least_dims_alike(answer((3, 5), (1, 4))) == NO_NOISE, "it may be the rest"


def test_noise_of_own_generators_is_counted_on_both_sides() -> None:
    def run(*own: bool) -> RunRecord:
        return RunRecord(steps=[StepRecord(rows=[0, 1, 2, 3], draws=[Draw(1, (4, 2), False, own=o) for o in own])])

    micro_batches = [Draw(place, (2, 2), again, own=True) for place in (1, 2) for again in (False, True)]
    parts = RunRecord(steps=[StepRecord(rows=[0, 1, 2, 3], draws=micro_batches)])
    assert is_own_noise_alike(Answer(one=OneDevice(run(True)), ranks=[parts, run(True)]))
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


@pytest.mark.parametrize("alike", [True, False])
def test_a_rank_that_holds_a_part_is_compared_with_itself(alike: bool) -> None:
    """Its rounding is none of its noise, and its settings are put where one device has them."""
    both = evidence(world=SHARED)
    due = both.one.run.steps[0]
    due.groups, due.settings = [frozenset({name}) for name in "abc"], [{"lr": rate} for rate in (0.1, 0.2, 0.3)]
    for rank, run in enumerate(both.ranks):
        for step in run.steps:
            half = step.gradients["weight"].value[:1].clone()
            step.gradients = {"weight": Part(Box((rank, *[0] * (half.dim() - 1)), tuple(half.shape)), half)}
    again = deepcopy([*both.ranks])
    for run in (both.ranks[1], again[1]):
        run.steps[0].groups, run.steps[0].settings = due.groups[1:], due.settings[1:]
    for run in both.ranks:
        align_settings(run, both.one.run)
    scale(again[1].steps[0].gradients, 1 + 1e-15 if alike else 1.01, ("weight",))
    scale(again[0].steps[0].gradients, 1 + 1e-15 if alike else 1.01, ("weight",))

    def run_again(salted: frozenset[int]) -> list[RunRecord]:
        return deepcopy(again)

    assert does_noise_matter(run_again, both) == (not alike)


def test_a_run_that_fails_tells_nothing() -> None:
    def run(salted: frozenset[int]) -> list[RunRecord]:
        raise RuntimeError("rank 1: ...")

    assert not does_noise_matter(run, evidence(world=SHARED))
