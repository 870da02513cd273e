"""The best cut of all, and among equally good ones always the same."""

from itertools import combinations
from random import Random

import pytest

from allranks.even_cut import cut_among, cut_evenly, divisors


def dearest(costs: list[float], starts: tuple[int, ...]) -> float:
    return max(sum(costs[start:end]) for start, end in zip(starts, (*starts[1:], len(costs)), strict=True))


@pytest.mark.parametrize(
    "costs",
    [
        [1.0] * 7,
        [3, 1, 1, 1, 5],
        [0, 0, 2, 0, 1, 3, 0],
        [1, 2, 3, 4, 5, 6],
        [5.0, 0.5, 0.25, 4.0, 4.0],
        [0, 0, 0],
        [0, 0, 0, 1],
    ],
)
def test_no_cut_is_better(costs: list[float]) -> None:
    for num_parts in range(1, len(costs) + 1):
        every = [(0, *rest) for rest in combinations(range(1, len(costs)), num_parts - 1)]
        best = min(dearest(costs, starts) for starts in every)
        found = cut_evenly(costs, num_parts)
        assert dearest(costs, tuple(found)) == best
        # The last part begins first, then the one before it.
        assert found[-1] == min(starts[-1] for starts in every if dearest(costs, starts) == best)


def loads(costs: list[float], owners: list[int], starts: tuple[int, ...]) -> list[float]:
    parts = [sum(costs[start:end]) for start, end in zip(starts, (*starts[1:], len(costs)), strict=True)]
    found = [sum(part for part, one in zip(parts, owners, strict=True) if one == owner) for owner in set(owners)]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("owners", [[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 1, 2, 0, 1, 2]], ids=str)
@pytest.mark.parametrize("head", [0.0, 0.05, 0.5, 1.9])
@pytest.mark.parametrize("number", [6, 7, 8, 11])
def test_no_owner_of_blocks_with_a_head_could_have_less(owners: list[int], head: float, number: int) -> None:
    costs = [1.0] * (number - 1) + [1 + head]
    every = [(0, *rest) for rest in combinations(range(1, number), len(owners) - 1)]
    found = cut_among(costs, owners)
    assert loads(costs, owners, tuple(found))[0] == min(loads(costs, owners, starts)[0] for starts in every)


def test_owners_of_one_part_each_have_the_even_cut_and_others_never_have_more() -> None:
    generator = Random(0)
    for number in range(4, 10):
        costs = [generator.random() for _ in range(number)]
        assert cut_among(costs, [2, 0, 1]) == cut_evenly(costs, 3)
        owners = [0, 1, 1, 0]
        even, found = (loads(costs, owners, tuple(cut)) for cut in (cut_evenly(costs, 4), cut_among(costs, owners)))
        assert found <= even
    assert cut_evenly([1, 1, 1, 1, 1, 1.05], 4) == [0, 1, 3, 5]  # there and back the second has four of six
    assert cut_among([1, 1, 1, 1, 1, 1.05], [0, 1, 1, 0]) == [0, 2, 3, 5]


def test_blocks_before_a_head_make_longer_stages() -> None:
    assert cut_evenly([1, 1, 1, 1, 1, 1, 1, 3.4], 2) == [0, 5]
    assert cut_evenly([1.0] * 8, 4) == [0, 2, 4, 6]


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 12, 36, 97)] == [
        [1],
        [1, 2, 3, 4, 6, 12],
        [1, 2, 3, 4, 6, 9, 12, 18, 36],
        [1, 97],
    ]
    assert len(divisors(10**12)) == 169, "at once"
