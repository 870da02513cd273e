"""What goes wrong and when."""

import re
import tracemalloc
from typing import Any

import numpy as np
import pytest

from allranks.errors import ConfigError
from allranks.rehearsing.histories import (
    BINS,
    EVENT_BYTES,
    MOST_BYTES,
    Array,
    _draw_bursts,
    check_room,
    draw_histories,
)
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


def test_the_whole_cluster_fails_as_often_with_few_nodes_as_with_many() -> None:
    model = FailureModel("x", (Component("storage", 0.0, Scope.CLUSTER, 3600.0, per_1000_days=200.0),))
    for nodes in (10, 5000):
        found = draw_histories(model, nodes, 50 * DAY, 400, seed=1)
        inside = found.times < 50 * DAY
        assert inside.sum() / 400 == pytest.approx(10, rel=0.05)
        assert (found.scopes[inside] == Scope.CLUSTER).all()
        assert not found.places.any()  # a place that every run has


class Told:
    """Draws what is written down: how many each failure brings, and every delay at its mean."""

    def __init__(self, *numbers: list[int]) -> None:
        self.numbers, self.means = list(numbers), list[list[float]]()

    def poisson(self, means: Array) -> Array:
        self.means.append(means.tolist())
        return np.array(self.numbers.pop(0))

    def exponential(self, scale: float, size: int) -> Array:
        return np.full(size, scale)


def test_a_burst_is_what_a_failure_brings_and_what_that_brings() -> None:
    """One at 10 s brings two 100 s later, of which one brings one more, and one at 950 s one that is too late."""
    parts = (
        Component("steady", 1.0, Scope.NODE, 0.0),
        Component("flaps", 1.0, Scope.PROCESS, 0.0, burst_failures=0.5, burst_seconds=100.0),
    )
    times = np.array([[10.0, 50.0, 950.0, np.inf], [np.inf] * 4, [20.0, np.inf, np.inf, np.inf]])
    which = np.array([[1, 0, 1, 0], [0] * 4, [0] * 4])
    carried = np.array([1, 2]), np.array([999.0, 1001.0]), np.array([1, 1])  # from before: one of them is too late
    random: Any = Told([2, 0, 1, 0, 0], [1, 0], [0])
    found, kinds = _draw_bursts(parts, times, which, carried, 1000.0, random)

    assert found.tolist() == [
        [10.0, 50.0, 110.0, 110.0, 210.0, 950.0, np.inf],
        [999.0, *[np.inf] * 6],
        [20.0, *[np.inf] * 6],
    ]
    assert kinds[0].tolist() == [1, 0, 1, 1, 1, 1, 0]
    assert random.means == [[0.5, 0.0, 0.5, 0.0, 0.5], [0.5, 0.5], [0.5]]
    assert kinds[1, 0] == 1


@pytest.mark.parametrize(("burst", "hours", "days"), [(0.9, 24.0, 14.0), (0.8, 24.0, 30.0), (0.95, 24.0 * 30, 7.0)])
def test_bursts_that_began_before_the_run_go_on_in_it(burst: float, hours: float, days: float) -> None:
    """However short the run is beside them: as many in the mean as is said, and in its first hours no fewer."""
    part = Component("flaps", 40.0, Scope.NODE, 60.0, burst_failures=burst, burst_seconds=3600.0 * hours)
    found = draw_histories(FailureModel("x", (part,)), 100, days * DAY, 4000, seed=1)
    inside = found.times[found.times < days * DAY]
    assert len(inside) / 4000 == pytest.approx(4 * days, rel=0.06)
    assert (inside < days * DAY / 4).mean() == pytest.approx(0.25, abs=0.01)


def test_bursts_change_when_failures_come_and_not_how_many() -> None:
    """Of n in the mean the variance is n / (1 - b)^2 where each brings b more (Hawkes); without bursts it is n."""
    each = {}
    for burst in (0.0, 0.6):
        parts = Component("node", 40.0, Scope.NODE, 0.0, burst_failures=burst, burst_seconds=1800.0)
        found = draw_histories(FailureModel("x", (parts,)), 100, 50 * DAY, 1500, seed=2)
        assert (np.sort(found.times, axis=1) == found.times).all()
        assert np.isinf(found.times[:, -1]).all()
        number = (found.times < 50 * DAY).sum(axis=1)
        assert number.mean() == pytest.approx(200, rel=0.02)
        each[burst] = number.var() / number.mean()
    assert each[0.0] == pytest.approx(1.0, rel=0.15)
    assert each[0.6] == pytest.approx(1 / 0.4**2, rel=0.15)


def test_a_burst_is_over_when_it_says() -> None:
    """Where first failures are ten days apart, the half that others bring come within hours."""
    parts = Component("node", 2.0, Scope.NODE, 0.0, burst_failures=0.5, burst_seconds=1800.0)
    found = draw_histories(FailureModel("x", (parts,)), 100, 1000 * DAY, 40, seed=3)
    gaps = np.concatenate([np.diff(row[row < 1000 * DAY]) for row in found.times])

    assert (gaps < DAY / 2).mean() == pytest.approx(0.5, abs=0.06)
    assert np.median(gaps[gaps < DAY / 2]) < 1800.0


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


def test_idle_spares_slow_nobody() -> None:
    model = FailureModel("x", (), stragglers_per_1000_node_days=10, straggler_seconds=600.0)
    slow = draw_histories(model, 300, 100 * DAY, 300, seed=0, running=100).slow
    assert slow[:, -1].mean() == pytest.approx(100 * 600.0, rel=0.05)


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
