"""The nouns of a plan: what they add up to, and when something fits."""

import dataclasses

import pytest

from allranks.layout import Layout
from allranks.plan import Bill, Checked, Choice, Estimate, MemoryUse, Plan, Ranked, Span, StepTime


def estimate(low: float, high: float, capacity: float = 80e9) -> Estimate:
    memory, time = MemoryUse(weights=low), StepTime(compute=1.0)
    peak, seconds = Span(low, (low + high) / 2, high), Span(0.9, 1.0, 1.1)
    choice = Choice(Layout(dp_replicate=8), 64, 2)
    return Estimate(choice, memory, {}, peak, capacity, time, seconds, (), 0.4, 64.0, 64.0)


@pytest.mark.parametrize(
    ("size", "micro_batch", "layout", "micro_steps"),
    [(64, 2, Layout(dp_replicate=8), 4), (65, 2, Layout(dp_replicate=8), 5), (64, 4, Layout(dp_shard=4, tp=2), 4)],
)
def test_micro_steps(size: int, micro_batch: int, layout: Layout, micro_steps: int) -> None:
    assert Choice(layout, size, micro_batch).micro_steps == micro_steps


@pytest.mark.parametrize("kind", [MemoryUse, StepTime])
def test_the_total_has_every_part_once(kind: type[MemoryUse] | type[StepTime]) -> None:
    names = [part.name for part in dataclasses.fields(kind)]
    values = {name: float(2**place) for place, name in enumerate(names)}
    assert kind(**values).total == 2 ** len(names) - 1


@pytest.mark.parametrize(
    ("low", "high", "fits", "may_fit"),
    [(60e9, 80e9, True, False), (70e9, 80.1e9, False, True), (80e9, 90e9, False, True), (81e9, 90e9, False, False)],
)
def test_what_fits_does_so_with_its_whole_interval(low: float, high: float, fits: bool, may_fit: bool) -> None:
    found = estimate(low, high)
    assert (found.fits, found.may_fit) == (fits, may_fit)


def test_what_would_fail_fits_nowhere() -> None:
    assert not dataclasses.replace(estimate(1e9, 2e9), fault="rank 3 waits").fits


def test_what_a_dry_run_made_of_an_estimate() -> None:
    fits, large = estimate(1e9, 2e9), estimate(90e9, 95e9)
    outcomes = [Checked(fits, after, "because").outcome for after in (fits, large, None)]
    assert outcomes == ["stands", "dropped", "not checked"]


def test_a_plan_is_led_by_its_best_or_by_what_came_nearest() -> None:
    best, near = Ranked(estimate(1e9, 2e9), "fits"), Ranked(estimate(90e9, 95e9), "needs 15 GB more")
    assert Plan("m", "c", 2, best, (), (), near).leading is best
    assert Plan("m", "c", 2, None, (), (), near).leading is near
    assert Plan("m", "c", 0, None, (), ()).leading is None


def test_days() -> None:
    assert Bill(1e9, 10, Span(1.0, 43200.0, 2.0), 4.0, None, "USD", None, "no price").days == 0.5
