"""The learning rate is a function of samples, so that it means the same whatever the batch and the devices."""

import math

import pytest

from allranks.stepping.schedule import Schedule


def test_constant_is_one() -> None:
    schedule = Schedule("constant", 0, 0, 0.0)
    assert [schedule.factor(samples, 8) for samples in (0, 8, 10**9)] == [1.0, 1.0, 1.0]


def test_warm_up_rises_to_the_peak_and_the_first_step_has_its_share() -> None:
    schedule = Schedule("constant", 32, 0, 0.0)
    assert [schedule.factor(samples, 8) for samples in (0, 8, 16, 24, 32)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    # A step that passes the end of the warm-up does not pass the peak.
    assert schedule.factor(30, 8) == 1.0


def test_linear_falls_to_the_floor_and_stays() -> None:
    schedule = Schedule("linear", 20, 120, 0.1)
    assert schedule.factor(20, 10) == 1.0
    assert schedule.factor(70, 10) == pytest.approx(0.55)
    assert schedule.factor(120, 10) == schedule.factor(10**6, 10) == pytest.approx(0.1)


def test_cosine_is_half_a_wave() -> None:
    schedule = Schedule("cosine", 0, 100, 0.0)
    assert schedule.factor(0, 1) == 1.0
    assert schedule.factor(25, 1) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    assert schedule.factor(50, 1) == pytest.approx(0.5)
    assert schedule.factor(100, 1) == pytest.approx(0.0)
    assert Schedule("cosine", 0, 100, 0.2).factor(50, 1) == pytest.approx(0.6)


def test_the_batch_does_not_change_the_curve() -> None:
    schedule = Schedule("cosine", 0, 960, 0.0)
    assert schedule.factor(480, 8) == schedule.factor(480, 96)


def test_a_warm_up_beyond_the_end_ends_at_the_floor() -> None:
    schedule = Schedule("linear", 100, 50, 0.25)
    assert schedule.factor(90, 10) == 1.0
    assert schedule.factor(101, 10) == pytest.approx(0.25)


def test_it_survives_a_checkpoint() -> None:
    schedule = Schedule("linear", 20, 120, 0.1)
    assert Schedule(**schedule.state_dict()) == schedule  # type: ignore[arg-type]
