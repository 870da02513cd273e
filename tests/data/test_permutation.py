import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key


def order(n: int, key: int) -> list[int]:
    """The whole permutation."""
    return [int(sample) for sample in permute(n, key, np.arange(n))]


def test_is_a_bijection_for_every_small_n() -> None:
    for n in range(1, 300):
        for key in (0, 1, 2**64 - 1):
            assert sorted(order(n, key)) == list(range(n))


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_is_a_bijection(n: int, key: int) -> None:
    assert sorted(order(n, key)) == list(range(n))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
def test_stays_inside_and_keeps_apart_at_any_size(n: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    samples = permute(n, key, np.array(positions, dtype=np.int64)).tolist()
    assert len(set(samples)) == len(positions)
    assert min(samples) >= 0 and max(samples) < n


def test_positions_are_independent_of_their_company() -> None:
    whole = permute(1000, 5, np.arange(1000))
    assert permute(1000, 5, np.array([999, 3, 3])).tolist() == [whole[999], whole[3], whole[3]]


@pytest.mark.sample(2)
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_is_equally_likely(n: int) -> None:
    places = {order: place for place, order in enumerate(itertools.permutations(range(n)))}
    counts = np.zeros(len(places))
    trials = 4000
    for epoch in range(trials):
        counts[places[tuple(order(n, epoch_key(0, epoch)))]] += 1
    expected = trials / len(places)
    freedom = len(places) - 1
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


def test_every_sample_is_equally_likely_at_every_place_and_neighbours_part() -> None:
    n, trials = 1000, 200
    orders = np.stack([permute(n, epoch_key(1, epoch), np.arange(n)) for epoch in range(trials)])
    # Means of a uniform law on 0..999 over 200 trials: standard deviation 20.4; 1000 of them stay within 5.
    assert np.abs(orders.mean(axis=0) - (n - 1) / 2).max() < 5 * 20.4
    # Two neighbours stay neighbours with probability 2/n: 400 are expected among 200 * 999 pairs.
    assert abs((np.abs(np.diff(orders, axis=1)) == 1).sum() - 400) < 5 * 20


def test_keys_give_different_orders() -> None:
    orders = np.stack([permute(500, epoch_key(seed, epoch), np.arange(500)) for seed in range(3) for epoch in range(3)])
    for one, other in itertools.combinations(orders, 2):
        assert (one == other).sum() < 12  # one is expected by chance


def test_outputs_are_frozen() -> None:
    """A checkpoint's position means nothing under another order: these numbers never change."""
    assert order(10, 1) == GOLDEN_10
    assert permute(1_000_003, epoch_key(0, 0), np.arange(5)).tolist() == GOLDEN_MILLION
    assert permute(2**40 + 7, 2**64 - 1, np.array([0, 1, 2**40])).tolist() == GOLDEN_HUGE


GOLDEN_10 = [1, 8, 2, 4, 5, 7, 3, 0, 9, 6]
GOLDEN_MILLION = [627456, 747859, 335797, 284691, 582308]
GOLDEN_HUGE = [240348159447, 748722516021, 1019044903075]
