"""Devices and links as TOML has them: units in the keys, and no figure rounded twice."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from allranks.planning.cluster_limits import GIGA
from allranks.planning.cluster_tables import MICRO, DeviceTable, LinkTable, exactly

DEVICE: dict[str, Any] = {"name": "d", "bandwidth_gb_per_s": 2000, "peak_tflops": {"bfloat16": 312}}


def test_memory_in_either_unit() -> None:
    assert DeviceTable.model_validate({**DEVICE, "memory_gb": 80}).to_device().memory_bytes == 80e9
    assert DeviceTable.model_validate({**DEVICE, "memory_mib": 81559}).to_device().memory_bytes == 81559 * 2**20
    for none_or_both in ({}, {"memory_gb": 80, "memory_mib": 80}):
        with pytest.raises(ValidationError, match="one of them"):
            DeviceTable.model_validate({**DEVICE, **none_or_both})


def test_bandwidth_in_either_unit() -> None:
    tables = ({"gbit_per_s": 400}, {"bandwidth_gb_per_s": 50})
    links = [LinkTable.model_validate({"name": "l", "latency_microseconds": 5, **table}).to_link() for table in tables]
    assert [link.bandwidth for link in links] == [50e9, 50e9]
    assert links[0].latency_seconds == 5e-6
    with pytest.raises(ValidationError, match="one of them"):
        LinkTable.model_validate({"name": "l", "latency_microseconds": 5})


def test_the_label_is_the_name_where_there_is_none() -> None:
    assert DeviceTable.model_validate({**DEVICE, "memory_gb": 80}).to_device().label == "d"


@pytest.mark.parametrize("wrong", ["80", True, Decimal("nan"), -1, 0])
def test_a_figure_is_a_positive_number(wrong: object) -> None:
    with pytest.raises(ValidationError):
        DeviceTable.model_validate({**DEVICE, "memory_gb": wrong})


def test_a_figure_is_limited_beside_the_others() -> None:
    with pytest.raises(ValidationError, match="did you mean 2 TB/s"):
        DeviceTable.model_validate({**DEVICE, "memory_gb": 80, "bandwidth_gb_per_s": 2})
    slow = {**DEVICE, "memory_gb": 80, "bandwidth_gb_per_s": 2, "measured": True}
    assert DeviceTable.model_validate(slow).to_device().memory_bandwidth == 2e9  # what was measured is believed


def test_the_share_of_a_host_is_read_and_limited() -> None:
    given = {**DEVICE, "memory_gb": 80}
    assert DeviceTable.model_validate(given).to_device().host_memory_bytes is None
    device = DeviceTable.model_validate({**given, "host_memory_gb": Decimal("187.5")}).to_device()
    assert device.host_memory_bytes == 187.5e9
    assert DeviceTable.from_device(device)["host_memory_gb"] == Decimal("187.5")
    with pytest.raises(ValidationError, match=r"host_memory_gb = 250000000000 is more than any host has"):
        DeviceTable.model_validate({**given, "host_memory_gb": 250_000_000_000})


@given(st.floats(1e-9, 1e15, allow_nan=False), st.sampled_from([GIGA, MICRO, Decimal(1)]))
def test_a_value_survives_its_unit(value: float, unit: Decimal) -> None:
    amount = exactly(value, unit)
    assert amount is not None and float(Decimal(str(amount)) * unit) == value


def test_nothing_has_no_unit() -> None:
    assert exactly(None, GIGA) is None
