"""Prices and watts of something else than a device: which are told, and that usual ones are not."""

from dataclasses import replace

import pytest

from allranks.planning.bill_suspicions import suspect_price, suspect_watts
from allranks.planning.catalog import device_names
from allranks.planning.hardware import find_cluster

NODE = find_cluster("2x8:h100")


@pytest.mark.parametrize(
    ("price", "told"),
    [
        (100000, "PRICE = 100000 is more than any device costs for an hour; is it what a device costs to buy?"),
        (98.32, "PRICE = 98.32 is more than any device costs for an hour; is it that of a node? Over 8 devices it is"),
        (0.0007, "PRICE = 0.0007 is less than any device costs for an hour; is it that of a second? For an hour it is"),
    ],
)
def test_a_price_of_something_else(price: float, told: str) -> None:
    (note,) = suspect_price(replace(NODE, device_hour_price=price), "PRICE")
    assert told in note


def test_a_price_of_one_device_is_not_taken_for_that_of_its_node() -> None:
    (note,) = suspect_price(replace(find_cluster("1:h100"), device_hour_price=98.32), "PRICE")
    assert "costs to buy" in note and "node" not in note


@pytest.mark.parametrize("price", [None, 0.02, 2.49, 14.2, 25])
def test_usual_prices_are_believed(price: float | None) -> None:
    assert list(suspect_price(replace(NODE, device_hour_price=price), "PRICE")) == []


def test_in_a_currency_of_small_units_no_price_is_suspected() -> None:
    assert list(suspect_price(replace(NODE, device_hour_price=2000, currency="KRW"), "PRICE")) == []
    assert len(list(suspect_price(replace(NODE, device_hour_price=2000, currency="eur"), "PRICE"))) == 1


@pytest.mark.parametrize(
    ("watts", "told"),
    [
        (0.7, "WATTS = 0.7 is less than h100 takes under load; did you mean 0.7 kW = 700 W?"),
        (5600, "WATTS = 5600 is more than any device of today takes; is it that of a node? Over 8 devices it is 700"),
    ],
)
def test_watts_of_something_else(watts: float, told: str) -> None:
    assert list(suspect_watts(replace(NODE, device_watts=watts), "WATTS")) == [told]


@pytest.mark.parametrize("device", device_names())
@pytest.mark.parametrize("watts", [None, 70, 700, 1400])
def test_usual_watts_are_believed(device: str, watts: float | None) -> None:
    assert list(suspect_watts(replace(find_cluster(f"8:{device}"), device_watts=watts), "WATTS")) == []


def test_a_processes_share_of_a_processor_takes_few_watts() -> None:
    cpu = find_cluster("1x2:cpu")
    assert list(suspect_watts(replace(cpu, device_watts=5), "WATTS")) == []
    assert len(list(suspect_watts(replace(cpu, device_watts=0.1), "WATTS"))) == 1
    assert list(suspect_price(replace(cpu, device_hour_price=0.005), "PRICE")) == []
