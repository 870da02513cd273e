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


def test_the_closed_form_gives_what_its_paper_prints() -> None:
    """arXiv 2410.21680: RSC-1 at 16,000 GPUs, 5 minutes to restart, a free save: 0.93 and, rounded, 0.7."""
    rate = 6.5 * 2000 / (1000 * DAY)

    assert expected_goodput(rate, 300, 300, 0.0) == pytest.approx(0.93, abs=0.005)
    assert expected_goodput(rate, 300, 3600, 0.0) == pytest.approx(0.7, abs=0.02)
