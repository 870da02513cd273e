"""Impossible figures: which are refused, which unit is suspected, and that the largest real ones pass."""

import re
from decimal import Decimal

import pytest

from allranks.planning import cluster_limits as limits
from allranks.planning.cluster_limits import Precision

BF16: Precision = "bfloat16"


def number(text: str) -> Decimal:
    return Decimal(text)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("81559", "MB? 81559 MB are 81.559 GB"),
        ("8e10", "bytes? 80000000000 bytes are 80 GB"),
        ("8e7", "kB? 80000000 kB"),
    ],
)
def test_memory_in_a_smaller_unit(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"did you mean {told}")):
        limits.check_device(("memory_gb", number(given), number(given)), number("2000"), {BF16: number("300")})


def test_a_figure_beyond_all_units() -> None:
    with pytest.raises(ValueError, match="give one device's"):
        limits.check_most("memory_gb", number("1e30"), number("1e30"), 10, "any device has")
    limits.check_most("memory_gb", number("10"), number("10"), 10, "any device has")


@pytest.mark.parametrize(
    ("rate", "told"),
    [("312000", "did you mean GFLOP/s? 312000 GFLOP/s are 312 TFLOP/s"), ("3.12e14", "FLOP/s are 312 TFLOP/s"),
     ("3.12e8", "did you mean MFLOP/s?"), ("7912", "is it that of a whole node, or with sparsity?")],
)  # fmt: skip
def test_a_peak_beyond_any_device(rate: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.check_peak("peak_tflops.bfloat16", number(rate), limits.MOST_TFLOPS[BF16])


def test_no_peak_at_all() -> None:
    with pytest.raises(ValueError, match="peak_tflops is empty"):
        limits.check_device(("memory_gb", number("80"), number("80")), number("2000"), {})


@pytest.mark.parametrize(
    ("memory", "bandwidth", "peak", "told"),
    [("0.08", "2000", "312", "did you mean 0.08 TB = 80 GB?"), ("80", "2", "312", "did you mean 2 TB/s = 2000 GB/s?"),
     ("80", "2000", "0.312", "did you mean 0.312 PFLOP/s = 312 TFLOP/s?")],
)  # fmt: skip
def test_a_figure_in_a_larger_unit(memory: str, bandwidth: str, peak: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.check_too_slow(("memory_gb", number(memory), number(memory)), number(bandwidth), {BF16: number(peak)})


def test_a_processor_is_slow_and_possible() -> None:
    limits.check_too_slow(("memory_gb", number("0.5"), number("0.5")), number("4"), {"float32": number("0.02")})


def test_measured_products_above_the_peak() -> None:
    peaks, rows = {BF16: number("312")}, {BF16: [(16, 16, 16, number("391"))]}
    with pytest.raises(ValueError, match=r"matmul_tflops\.bfloat16 = 391 is above peak_tflops\.bfloat16 = 312"):
        limits.check_measured(peaks, {BF16: number("391")}, {})
    limits.check_measured(peaks, {BF16: number("390")}, {})  # a clock beyond the data sheet's
    with pytest.raises(ValueError, match=r"matmul_shapes_tflops\.bfloat16 = 391 is above"):
        limits.check_measured(peaks, {}, rows)
    with pytest.raises(ValueError, match=r"a row is \[rows, inner, columns, TFLOP/s\]"):
        limits.check_measured(peaks, {}, {BF16: [(16, 0, 16, number("1"))]})
    limits.check_measured(peaks, {"float32": number("19")}, {BF16: [(16, 16, 16, number("312"))], "float32": []})


@pytest.mark.parametrize(
    ("bandwidth", "latency", "told"),
    [("3600", "3", "did you mean 3600 Gbit/s = 450 GB/s (gbit_per_s = 3600)?"), ("50e9", "3", "did you mean bytes?"),
     ("50", "4700000", "did you mean 4700000 nanoseconds"), ("50", "0.0000047", "= 4.7 microseconds?")],
)  # fmt: skip
def test_a_link_in_another_unit(bandwidth: str, latency: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.check_link("bandwidth_gb_per_s", number(bandwidth), number(bandwidth), number(latency))


def test_the_fastest_link_sold_passes() -> None:
    limits.check_link("bandwidth_gb_per_s", number("1800"), number("1800"), number("0.5"))


def test_times_that_no_link_reaches() -> None:
    half_a_second = [(number("1073741824"), number("8193"))]
    limits.check_times(number("300"), {"all_reduce": {8: half_a_second}})
    with pytest.raises(ValueError, match="in milliseconds, or seconds"):
        limits.check_times(number("300"), {"all_reduce": {8: [(number("1073741824"), number("8.193"))]}})
    with pytest.raises(ValueError, match="a group has at least 2 devices"):
        limits.check_times(number("300"), {"send": {1: half_a_second}})
    with pytest.raises(ValueError, match="rise in bytes"):
        limits.check_times(number("300"), {"send": {2: half_a_second * 2}})


@pytest.mark.parametrize(("watts", "told"), [("700000", "did you mean 700000 mW = 700 W?"), ("10200", "of a node?")])
def test_watts(watts: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.check_watts(number(watts))
    limits.check_watts(number("1400"))


def test_a_bus_between_fast_devices() -> None:
    with pytest.raises(ValueError, match=re.escape("did you mean 0.45 TB/s = 450 GB/s?")):
        limits.check_inside(number("0.45"), number("989"))
    limits.check_inside(number("0.45"), number("0.2"))


def test_a_fabric_of_bytes_and_of_a_node() -> None:
    with pytest.raises(ValueError, match=re.escape("did you mean 400 Gbit/s = 50 GB/s (gbit_per_s = 400)?")):
        limits.check_between(number("400"), given_in_bits=False, devices_per_node=8)
    with pytest.raises(ValueError, match="Over 8 devices it is 400 Gbit/s a device"):
        limits.check_between(number("400"), given_in_bits=True, devices_per_node=8)
    limits.check_between(number("200"), given_in_bits=True, devices_per_node=8)


def test_a_peak_with_sparsity() -> None:
    with pytest.raises(ValueError, match=re.escape("1979 is 2 times the dense peak of h100, 989.4")):
        limits.check_sparse("h100", {BF16: number("1979")}, {BF16: number("989.4")})
    limits.check_sparse("h100", {BF16: number("1100"), "float4": number("3000")}, {BF16: number("989.4")})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("200000", "did you mean Mbit/s? 200000 Mbit/s are 200 Gbit/s"),
        ("2e8", "did you mean kbit/s? 200000000 kbit/s are 200 Gbit/s"),
        ("2e11", "did you mean bit/s?"),
        ("1e30", "give one device's"),
    ],
)
def test_a_link_in_smaller_bits(given: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        limits.check_link("gbit_per_s", number(given), number(given) / 8, number("3"))


def test_more_than_the_catalogs_device_of_that_name_has() -> None:
    with pytest.raises(ValueError, match=re.escape("bandwidth_gb_per_s = 16312 is 8 times that of a100-80g, 2039; is")):
        limits.check_like("a100-80g", "bandwidth_gb_per_s", number("16312"), number("2039"))
    limits.check_like("a100-80g", "bandwidth_gb_per_s", number("3058"), number("2039"))


def test_a_host_and_a_disk_that_are_too_slow() -> None:
    with pytest.raises(ValueError, match=re.escape("did you mean 0.0315 TB/s = 31.5 GB/s?")):
        limits.check_host(number("0.0315"), number("312"))
    limits.check_host(number("0.0315"), number("0.2"))
    with pytest.raises(ValueError, match=re.escape("did you mean 2e-06 PB/s = 2 GB/s?")):
        limits.check_storage(number("2e-6"))
    with pytest.raises(ValueError, match=re.escape("did you mean 0.0005 TB/s = 0.5 GB/s?")):
        limits.check_storage(number("0.0005"))
    limits.check_storage(number("0.02"))
