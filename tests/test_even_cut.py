"""The best cut of all, and among equally good ones always the same."""

from itertools import combinations

import pytest

from allranks.even_cut import cut_evenly


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


def test_blocks_before_a_head_make_longer_stages() -> None:
    assert cut_evenly([1, 1, 1, 1, 1, 1, 1, 3.4], 2) == [0, 5]
    assert cut_evenly([1.0] * 8, 4) == [0, 2, 4, 6]
