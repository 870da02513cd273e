"""Parts against wholes: places, bounds, factors, twins that disagree."""

import math

import pytest
import torch

from allranks.parameter_map import Box
from allranks.verifying.assembly import allowance, compare_parts, copies_of, fit, locate, moved_by, put_together
from allranks.verifying.recording import Part

WHOLE = torch.arange(1.0, 13.0, dtype=torch.float64).reshape(4, 3)
TOP, BOTTOM = Box((0, 0), (2, 3)), Box((2, 0), (2, 3))


def halves(factor: float = 1.0) -> list[dict[str, Part]]:
    return [{"w": Part(TOP, WHOLE[:2])}, {"w": Part(BOTTOM, WHOLE[2:] * factor)}]


def test_equal_parts_do_not_differ() -> None:
    assert compare_parts(halves(), {"w": Part(None, WHOLE)}, (), {}) == []


@pytest.mark.parametrize("error", [1e-9, math.nan, math.inf])
def test_one_element_is_seen(error: float) -> None:
    ranks = halves()
    value = WHOLE[2:].clone()
    value[1, 2] += error
    ranks[1]["w"] = Part(BOTTOM, value)
    (mismatch,) = compare_parts(ranks, {"w": Part(None, WHOLE)}, (), {})
    assert mismatch.ranks == (1,)
    assert mismatch.error == pytest.approx(1e-9, rel=1e-3) if error == 1e-9 else math.isinf(mismatch.error)


def test_a_factor_is_fitted_for_each_rank_and_for_all() -> None:
    (mismatch,) = compare_parts(halves(2.0), {"w": Part(None, WHOLE)}, (), {})
    assert mismatch.factors == {0: pytest.approx(1.0), 1: pytest.approx(2.0)} and math.isnan(mismatch.factor)
    ranks = [{"w": Part(None, WHOLE * 0.5)}, {"w": Part(None, WHOLE * 0.5)}]
    (mismatch,) = compare_parts(ranks, {"w": Part(None, WHOLE)}, (), {})
    assert mismatch.factor == pytest.approx(0.5) and mismatch.agree
    assert math.isnan(fit(WHOLE + 1, WHOLE, 1e-12)) and math.isnan(fit(WHOLE, WHOLE * 0, 1e-12))


def test_twins_that_disagree_and_parts_that_are_nowhere() -> None:
    ranks = [{"w": Part(None, WHOLE)}, {"w": Part(None, WHOLE + 1)}]
    (mismatch,) = compare_parts(ranks, {"w": Part(None, WHOLE)}, (), {})
    assert not mismatch.agree and mismatch.ranks == (1,)
    (mismatch,) = compare_parts([{}, {}], {"w": Part(None, WHOLE)}, (), {})
    assert mismatch.missing
    (mismatch,) = compare_parts([halves()[0]], {"w": Part(None, WHOLE)}, (), {})
    assert math.isinf(mismatch.error) and not mismatch.missing
    assert put_together("w", WHOLE, [halves()[0]], {}) is None
    whole = put_together("w", WHOLE, halves(), {})
    assert whole is not None and torch.equal(whole, WHOLE)


def test_copies_of_what_several_ranks_hold() -> None:
    ranks = [*halves(), *halves(2.0)]
    (first, one), (second, two) = copies_of("w", WHOLE, ranks, {})
    assert (first, second) == ((0, 1), (2, 3)) and torch.equal(one, WHOLE) and torch.equal(two[2:], 2 * WHOLE[2:])
    (first, one), (second, two) = copies_of("w", WHOLE, ranks[:3], {})
    assert (first, second) == ((0, 1), (1, 2)) and torch.equal(two, WHOLE), "the bottom has one holder"
    wholes: list[dict[str, Part]] = [{"w": Part(None, WHOLE * (1 + rank))} for rank in range(2)]
    assert [own for own, _ in copies_of("w", WHOLE, wholes, {})] == [(0,), (1,)]
    assert copies_of("w", WHOLE, [halves()[0]] * 2, {}) == [] == copies_of("w", WHOLE, [{}], {})


def test_a_part_that_was_cut_by_hand_is_found_by_its_values() -> None:
    assert locate(WHOLE, Part(None, WHOLE[:, 1:3].clone())) == [Box((0, 1), (4, 2))]
    assert locate(WHOLE, Part(None, WHOLE[:, 1:3] + 5)) == []
    assert locate(WHOLE, Part(None, WHOLE)) == [Box.whole((4, 3))]
    assert locate(WHOLE, Part(TOP, WHOLE[:2])) == [TOP]
    assert locate(WHOLE, Part(None, WHOLE[0])) == locate(WHOLE, Part(None, torch.ones(5, 3))) == []
    assert locate(torch.zeros(3), Part(None, torch.zeros(2))) == [Box((0,), (2,)), Box((1,), (2,))]
    twice = torch.tensor([1.0, 2.0, 1.0, 3.0])
    assert locate(twice, Part(None, twice[2:])) == [Box((2,), (2,))]


def test_rounding_widens_the_bound() -> None:
    moved = WHOLE.clone()
    moved[0, 0] += 1e-6
    ranks = [{"w": Part(None, WHOLE + 2e-5)}]
    assert compare_parts(ranks, {"w": Part(None, WHOLE)}, [{"w": Part(None, moved)}], {}) == []
    assert moved_by(WHOLE, [moved, None]) == pytest.approx(1e-6) and moved_by(WHOLE, [WHOLE * math.nan]) == 0.0


@pytest.mark.parametrize("factor", [0.0, 0.5, 7 / 8, 9 / 8, 2.0, -1.0])
def test_no_rounding_excuses_a_factor(factor: float) -> None:
    """Whatever moves a tensor by as much as it is large is not rounding."""
    wild = [{"w": Part(None, WHOLE * -3)}, {"w": Part(None, WHOLE * 0.4)}]
    (mismatch,) = compare_parts([{"w": Part(None, WHOLE * factor)}], {"w": Part(None, WHOLE)}, wild, {}, largest=12.0)
    assert mismatch.bound == pytest.approx(1.2)
    assert compare_parts([{"w": Part(None, WHOLE)}], {"w": Part(None, WHOLE)}, wild, {}) == []
    # Of a parameter the way counts that it has gone, not how large it is.
    sizes = {"w": 1e-3}
    (mismatch,) = compare_parts([{"w": Part(None, WHOLE + 5e-4)}], {"w": Part(None, WHOLE)}, wild, {}, sizes=sizes)
    assert mismatch.bound == pytest.approx(1e-4)


def test_what_rounding_turns_around_and_is_small_beside_others_is_as_good_as_zero() -> None:
    assert allowance(1e-8, 1e-8, 1.0) == pytest.approx(32e-8)
    assert allowance(1e-8, 1e-8) == pytest.approx(1e-9)  # nothing says that it is small
    assert allowance(0.5, 0.5, 1.0) == pytest.approx(0.05)  # nor is this
    assert allowance(1e-10, 1e-8, 1.0) == pytest.approx(1e-9)  # rounding does not turn it around
    assert allowance(1e-12, 1e-8, 1.0) == pytest.approx(32e-12)


def test_elements_that_do_not_count_are_left_out() -> None:
    counted = torch.ones_like(WHOLE, dtype=torch.bool)
    counted[0, 0] = False
    moved = WHOLE.clone()
    moved[0, 0] = 7
    assert compare_parts([{"w": Part(None, moved)}], {"w": Part(None, WHOLE)}, (), {}, counted={"w": counted}) == []


def test_of_many_places_those_of_an_equal_cut_are_looked_at() -> None:
    """A head of zeros, cut over its vocabulary, lies at every row; one by one that took minutes."""
    whole = torch.zeros(10_000, 8)
    starts = [box.offset[0] for box in locate(whole, Part(None, torch.zeros(2500, 8)))]
    assert starts == [0, 2500, 5000, 7500]
    nearly = [box.offset[0] for box in locate(torch.zeros(1000), Part(None, torch.zeros(333)))]
    assert {334, 667} <= set(nearly) and len(nearly) < 10, "334, 333 and 333"
