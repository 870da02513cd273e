"""The closed forms, against their own papers' figures and each other."""

import pytest

from allranks.rehearsing.formulas import daly_interval, expected_goodput, young_interval
from allranks.simulation import DAY


def test_young_and_daly_agree_where_failures_are_rare() -> None:
    assert young_interval(5.0, 1e6) == pytest.approx(3162.28, rel=1e-5)
    assert daly_interval(5.0, 1e6) == pytest.approx(young_interval(5.0, 1e6), rel=0.002)


def test_daly_takes_the_save_off_and_never_less_than_nothing() -> None:
    assert 0 < daly_interval(600.0, 3600.0) < young_interval(600.0, 3600.0)
    assert daly_interval(9000.0, 3600.0) == 3600.0


@pytest.mark.parametrize("save", [1.0, 30.0, 120.0])
def test_no_interval_near_dalys_gives_more_goodput_by_formula(save: float) -> None:
    mean = 3 * 3600.0
    best = daly_interval(save, mean)

    def goodput(every: float) -> float:
        return expected_goodput(1 / mean, 300.0, every, save)

    assert goodput(best) > goodput(2 * best)
    assert goodput(best) > goodput(best / 2)


@pytest.mark.parametrize(("mean_hours", "best_minutes"), [(24.0, 117.0), (6.0, 57.0), (0.25, 9.1)])
def test_the_best_of_the_closed_form_is_what_its_paper_prints(mean_hours: float, best_minutes: float) -> None:
    """Daly 2006, figures 3 to 5: 10 minutes to restart, 5 to save; the model's best interval."""
    grid = [number / 10 for number in range(20, 2000)]
    best = max(grid, key=lambda minutes: expected_goodput(1 / (60 * mean_hours), 10.0, minutes, 5.0))

    assert best == pytest.approx(best_minutes, abs=0.5 if best_minutes > 10 else 0.15)


def test_to_first_order_it_is_the_published_one_of_rsc_1() -> None:
    """arXiv 2410.21680: RSC-1 at 16,000 GPUs, 5 minutes to restart, a free save every 5 minutes: 0.93."""
    rate = 6.5 * 2000 / (1000 * DAY)
    assert expected_goodput(rate, 300, 300, 0.0) == pytest.approx(0.93, abs=0.005)

    rare = rate / 1000
    linear = (1 - rare * (300 + 300 / 2)) / (1 + 6 / 300)
    assert expected_goodput(rare, 300, 300, 6.0) == pytest.approx(linear, abs=1e-6)


def test_where_nothing_or_all_fails() -> None:
    assert expected_goodput(0.0, 300.0, 90.0, 10.0) == 0.9
    assert expected_goodput(1e-12, 300.0, 90.0, 10.0) == pytest.approx(0.9)
    assert expected_goodput(100.0, 300.0, 3600.0, 0.0) == 0.0
