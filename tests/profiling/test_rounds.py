"""Pieces of work by turns: each measured in every round, the slow left out, and an end that all agree on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from allranks.profiling import rounds
from allranks.profiling.rounds import MOST_REPEATS, Case, Pace, repeats, take_rounds


class Clock:
    """A clock that only work moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> Case:
        """Work that takes so long: at the first call, the second, ..., and the last figure at all others."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return Case(name, call)


def together(numbers: Sequence[float]) -> list[float]:
    return list(numbers)


def pace(budget: float = 1e9, most: float = 1.0, agree: Callable[[Sequence[float]], list[float]] = together) -> Pace:
    return Pace(lambda: None, lambda: None, agree, budget, most)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def measured(clock: Clock, cases: list[Case], num_rounds: int, how: Pace) -> dict[object, float]:
    with patch.object(rounds, "time", clock):
        return dict(take_rounds(cases, num_rounds, how))


def test_the_median_of_all_rounds_without_the_first_call(clock: Clock) -> None:
    case = clock.work("a", 0.9, 0.5, 0.1, 0.3, 0.2)
    assert measured(clock, [case], 3, pace()) == {"a": pytest.approx(0.2)}


def test_another_figure_of_all_rounds(clock: Clock) -> None:
    case = clock.work("a", 0.9, 0.5, 0.3, 0.1, 0.2)
    assert measured(clock, [case], 3, replace(pace(), figure=min)) == {"a": pytest.approx(0.1)}


def test_what_is_quick_is_called_several_times_a_sample(clock: Clock) -> None:
    assert measured(clock, [clock.work("a", 1e-3)], 1, pace()) == {"a": pytest.approx(1e-3)}
    assert len(clock.calls) == 2 + 2


def test_cases_take_turns(clock: Clock) -> None:
    measured(clock, [clock.work("a", 0.1), clock.work("b", 0.1)], 2, pace())
    assert clock.calls == ["a", "a", "b", "b", "a", "b", "a", "b"]


def test_a_slow_case_is_left_out_after_two_calls_and_a_very_slow_one_after_one(clock: Clock) -> None:
    cases = [clock.work("slow", 1.5), clock.work("very slow", 9.0), clock.work("starts slowly", 3.0, 0.1)]
    assert set(measured(clock, cases, 1, pace())) == {"starts slowly"}
    assert clock.calls == ["slow", "slow", "very slow", "starts slowly", "starts slowly", "starts slowly"]


def test_what_is_needed_is_measured_however_long_it_takes(clock: Clock) -> None:
    case = replace(clock.work("slow", 9.0), needed=True)
    assert measured(clock, [case], 1, pace()) == {"slow": pytest.approx(9.0)}


def test_no_case_and_no_round_begins_after_the_budget(clock: Clock) -> None:
    cases = [clock.work(name, 0.5) for name in "abc"]
    assert set(measured(clock, cases, 9, pace(budget=1.9))) == {"a", "b"}
    assert clock.calls == ["a", "a", "b", "b", "a", "b"]


def test_the_slowest_process_decides(clock: Clock) -> None:
    def agree(numbers: Sequence[float]) -> list[float]:
        return [2.0 for _ in numbers]

    assert measured(clock, [clock.work("a", 0.1)], 1, pace(agree=agree)) == {}


def test_the_device_ends_before_the_clock_does(clock: Clock) -> None:
    def finish() -> None:
        clock.now += 0.4

    how = Pace(lambda: None, finish, together, 1e9, 1.0)
    assert measured(clock, [clock.work("a", 0.1)], 1, how) == {"a": pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("seconds", "sample", "calls"),
    [(1e-9, 2e-3, MOST_REPEATS), (0.0, 2e-3, MOST_REPEATS), (1e-4, 2e-3, 20), (1e-4, 60e-3, 600), (1.0, 60e-3, 1)],
)
def test_repeats(seconds: float, sample: float, calls: int) -> None:
    assert repeats(seconds, sample) == calls


def test_a_sample_is_as_long_as_it_is_told(clock: Clock) -> None:
    how = Pace(lambda: None, lambda: None, together, 1e9, 1.0, sample_seconds=0.5)
    measured(clock, [clock.work("a", 0.1)], 1, how)
    assert len(clock.calls) == 2 + 5


def test_what_a_process_computes_itself_counts_where_that_is_asked(clock: Clock) -> None:
    """Other programs take turns of the clock, and none of this time."""

    def process_time() -> float:
        return clock.now / 10

    with patch.object(Clock, "process_time", staticmethod(process_time), create=True):
        found = measured(clock, [clock.work("a", 0.9, 0.5)], 2, replace(pace(), processor_time=True))
    assert found == {"a": pytest.approx(0.05)}
