"""Time, money and energy for a number of tokens, and the limits."""

import math
from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Cluster
from allranks.errors import ConfigError
from allranks.plan import Estimate
from allranks.planning.bills import bill_of, check_limits, unmet_limits
from allranks.planning.search import Search
from tests.planning.questions import ask

QUESTION = ask()


def best() -> Estimate:
    found = Search(QUESTION.space()).run().best
    assert found is not None
    return found


def priced(**figures: Any) -> Cluster:
    return replace(QUESTION.cluster, **figures, price_source="the invoice")


def test_steps_seconds_and_device_hours() -> None:
    found = best()
    bill = bill_of(found, 1e9, 4096, QUESTION.cluster)
    assert bill.steps == math.ceil(1e9 / (32 * 4096))
    assert bill.seconds.expected == pytest.approx(bill.steps * found.step_seconds.expected)
    assert bill.seconds.low < bill.seconds.expected < bill.seconds.high
    assert bill.device_hours == pytest.approx(bill.seconds.expected * 16 / 3600)


def test_what_nobody_knows_is_left_out_with_its_because() -> None:
    bill = bill_of(best(), 1e9, 4096, QUESTION.cluster)
    assert bill.money is None and bill.kilowatt_hours is None
    assert "no price and no watts" in bill.because and "price_per_device_hour" in bill.because


def test_price_and_watts_of_the_user() -> None:
    bill = bill_of(best(), 1e9, 4096, priced(device_hour_price=2.5, device_watts=400.0))
    assert bill.money is not None and bill.kilowatt_hours is not None
    assert bill.money.expected == pytest.approx(2.5 * bill.device_hours)
    assert bill.kilowatt_hours.expected == pytest.approx(0.4 * bill.device_hours)
    for amount in (bill.money, bill.kilowatt_hours):
        assert amount.low / amount.expected == pytest.approx(bill.seconds.low / bill.seconds.expected)
        assert amount.high / amount.expected == pytest.approx(bill.seconds.high / bill.seconds.expected)
    assert bill.because == "from the invoice"


def test_limits_are_kept_or_said() -> None:
    cluster = priced(device_hour_price=2.0)
    bill = bill_of(best(), 1e12, 4096, cluster)
    assert bill.money is not None
    cost = bill.money.expected
    kept = replace(QUESTION, cluster=cluster, tokens=1e12, limit_seconds=bill.seconds.expected, limit_money=cost)
    assert unmet_limits(bill, kept) == ()
    missed = replace(kept, limit_seconds=0.5 * bill.seconds.expected, limit_money=0.5 * cost)
    late, dear = unmet_limits(bill, missed)
    assert "for 1.0T tokens on 16 devices, more than the deadline of" in late
    assert f"{cost:,.0f} USD" in dear and f"more than the budget of {0.5 * cost:,.0f} USD" in dear
    assert unmet_limits(None, missed) == ()


@pytest.mark.parametrize(
    ("limit", "name"), [({"limit_seconds": 1.0}, "--deadline"), ({"limit_money": 1.0}, "--budget")]
)
def test_a_limit_without_tokens_is_refused(limit: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs --tokens"):
        check_limits(replace(QUESTION, **limit))


def test_a_budget_without_a_price_is_refused() -> None:
    with pytest.raises(ConfigError, match="--budget needs a price: add --price"):
        check_limits(replace(QUESTION, tokens=1e9, limit_money=1.0))
    check_limits(replace(QUESTION, cluster=priced(device_hour_price=2.0), tokens=1e9, limit_money=1.0))
