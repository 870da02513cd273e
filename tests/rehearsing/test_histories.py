"""What goes wrong and when."""

import re
import tracemalloc

import numpy as np
import pytest

from allranks.errors import ConfigError
from allranks.rehearsing.histories import BINS, EVENT_BYTES, MOST_BYTES, check_room, draw_histories
from allranks.simulation import DAY, Component, FailureModel, Scope

MODEL = FailureModel(
    "x", (Component("node", 30.0, Scope.NODE, 3600.0), Component("rack", 10.0, Scope.RACK, 7200.0)), rack_nodes=4
)


def test_failures_come_as_often_as_the_rate_says_and_in_order() -> None:
    found = draw_histories(MODEL, 100, 50 * DAY, 200, seed=1)
    inside = np.isfinite(found.times) & (found.times < 50 * DAY)

    assert inside.sum() / 200 == pytest.approx(200, rel=0.03)
    assert (np.diff(found.times[:, :-1]) > 0).all()
    assert np.isinf(found.times[:, -1]).all()
    assert (found.scopes[inside] == Scope.RACK).mean() == pytest.approx(0.25, abs=0.02)
    for scope, mean in ((Scope.NODE, 3600.0), (Scope.RACK, 7200.0)):
        assert found.repairs[inside & (found.scopes == scope)].mean() == pytest.approx(mean, rel=0.05)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    first, again, other = (draw_histories(MODEL, 10, DAY, 3, seed=seed) for seed in (1, 1, 2))

    assert (first.times == again.times).all()
    assert (first.places == again.places).all()
    assert (first.times[:, 0] != other.times[:, 0]).all()


def test_nothing_fails_where_nothing_can() -> None:
    found = draw_histories(FailureModel("none", ()), 10, DAY, 2, seed=0)

    assert np.isinf(found.times).all()
    assert not found.slow.any()


def test_slow_time_is_the_union_of_the_times_in_which_a_node_is_slow() -> None:
    """Where so many are slow that always one is, all the time is slow; where few are, their lengths add up."""
    often = FailureModel("x", (), stragglers_per_1000_node_days=1e5, straggler_seconds=1e4)
    rarely = FailureModel("x", (), stragglers_per_1000_node_days=10, straggler_seconds=600.0)

    assert draw_histories(often, 100, DAY, 2, seed=0).slow[:, -1] == pytest.approx(DAY, rel=0.01)
    slow = draw_histories(rarely, 100, 100 * DAY, 300, seed=0).slow
    assert slow[:, -1].mean() == pytest.approx(100 * 600.0, rel=0.05)
    assert (np.diff(slow, axis=1) >= 0).all()


def test_slow_seconds_between_two_bins_are_spread_evenly() -> None:
    found = draw_histories(FailureModel("x", (), stragglers_per_1000_node_days=1e5), 100, DAY, 1, seed=0)
    edge = DAY / BINS * 40
    half = found.slow_until(np.array([0]), np.array([edge + DAY / BINS / 2]))[0]

    assert half == pytest.approx((found.slow[0, 40] + found.slow[0, 41]) / 2)
    assert found.slow_until(np.array([0]), np.array([DAY]))[0] == found.slow[0, -1]


def test_more_than_memory_holds_is_refused_with_what_would_do() -> None:
    with pytest.raises(ConfigError, match=r"1,000,000 runs of .* failures on 100 nodes need .* --runs \d+") as caught:
        draw_histories(MODEL, 100, 50 * DAY, 10**6, seed=0)
    most = int(re.findall(r"--runs (\d+) or fewer", str(caught.value))[0])
    assert check_room(MODEL, 100, 50 * DAY, most) > 200
    with pytest.raises(ConfigError):
        check_room(MODEL, 100, 50 * DAY, most + 1)
    with pytest.raises(ConfigError, match="take fewer --days, or a smaller --failures"):
        check_room(FailureModel("x", (Component("node", 1e5, Scope.NODE, 0.0),)), 10_000, 3650 * DAY, 1)


def test_what_is_drawn_takes_no_more_than_is_counted() -> None:
    tracemalloc.start()
    try:
        events = check_room(MODEL, 2000, 500 * DAY, 4)
        draw_histories(MODEL, 2000, 500 * DAY, 4, seed=0)
        highest = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    counted = 4 * (events * EVENT_BYTES + (BINS + 1) * 8)
    assert 0.5 * counted < highest <= counted < MOST_BYTES
