"""Kernels: the roofline, whole tiles and waves, attention's rate."""

from dataclasses import replace
from typing import Any

import pytest

from allranks.cluster import Device
from allranks.planning.compute import (
    GROUPED,
    KERNEL_SECONDS,
    UNALIGNED,
    UNALIGNED_BATCH,
    UPDATE_BYTES,
    Machine,
    attention_seconds,
    head_share,
    matmul_seconds,
    moving_seconds,
    update_seconds,
)
from allranks.planning.constants import constants_of
from tests.planning.profiles import cluster

DEVICE = cluster().device
MACHINE = Machine(DEVICE, constants_of(DEVICE))
UNITS = MACHINE.constants.units


def product(rows: float, out: float, into: float, batch: float = 1.0) -> float:
    return matmul_seconds(MACHINE, rows, out, into, "bfloat16", batch) - KERNEL_SECONDS


def test_a_large_product_reaches_the_devices_rate() -> None:
    rows, out, into = 256 * UNITS, 128 * 64, 8192
    depth = into / (into + MACHINE.constants.depth)
    assert product(rows, out, into) == pytest.approx(2.0 * rows * out * into / (MACHINE.rate("bfloat16") * depth))


def test_one_tile_too_many_takes_a_whole_wave_more() -> None:
    # NVIDIA's guide: tiles run in waves as wide as the device has processors.
    one_wave = product(256 * UNITS, 128, 4096)
    assert product(256 * UNITS + 256, 128, 4096) > 1.3 * one_wave
    assert product(256 * UNITS * 2, 128, 4096) == pytest.approx(2 * one_wave)


def test_a_thin_product_is_bound_by_memory() -> None:
    rows, out, into = 64, 8192, 8192
    moved = 2.0 * (rows * into + into * out + rows * out)
    fast = Machine(replace(DEVICE, peak_flops={"bfloat16": 1e15}), MACHINE.constants)
    seconds = matmul_seconds(fast, rows, out, into, "bfloat16") - KERNEL_SECONDS
    assert seconds == pytest.approx(moved / fast.bandwidth)


def test_rows_that_are_no_multiple_of_16_bytes_are_slow() -> None:
    even, odd = product(16384, 8192, 8192), product(16384, 8191, 8192)
    assert odd / even == pytest.approx(UNALIGNED, rel=0.05)
    heads, short = product(2048, 2048, 112, batch=64), product(2048, 2048, 108, batch=64)
    assert short / heads > UNALIGNED_BATCH * 0.8


def test_a_weights_gradient_is_slow_where_its_features_are_odd_not_its_positions() -> None:
    def gradient(out: float, positions: float) -> float:
        return matmul_seconds(MACHINE, out, 8192, positions, "bfloat16", features=(out, 8192)) - KERNEL_SECONDS

    assert gradient(8192, 1023) == pytest.approx(gradient(8192, 1024), rel=0.01)
    assert gradient(8191, 1024) / gradient(8192, 1024) == pytest.approx(UNALIGNED, rel=0.05)


def test_nothing_takes_no_time() -> None:
    assert matmul_seconds(MACHINE, 0, 8, 8, "bfloat16") == 0.0


def test_a_precision_that_the_device_lacks_runs_in_the_next_wider_one() -> None:
    assert MACHINE.peak("float8") == MACHINE.peak("bfloat16") == 100e12
    assert MACHINE.peak("float32") == 10e12
    assert Machine(Device("x", "x", 1.0, 1.0, {"float32": 3.0}), MACHINE.constants).peak("bfloat16") == 3.0


def test_causal_attention_does_half_the_work() -> None:
    whole = attention_seconds(MACHINE, 1e12, 128, 1.0, "bfloat16") - KERNEL_SECONDS
    half = attention_seconds(MACHINE, 1e12, 128, 0.5, "bfloat16") - KERNEL_SECONDS
    assert whole / half == pytest.approx(2.0)
    assert whole == pytest.approx(1e12 / (100e12 * MACHINE.constants.attention))
    slower = attention_seconds(MACHINE, 1e12, 128, 1.0, "bfloat16", "flash2") - KERNEL_SECONDS
    assert slower / whole == pytest.approx(MACHINE.constants.attention / MACHINE.constants.flash2)


def test_short_heads_leave_attention_less() -> None:
    assert head_share(128) == 1.0
    assert head_share(64) == 0.75
    assert head_share(96) == pytest.approx(0.75)  # padded to 128


def test_elementwise_kernels_are_bound_by_memory() -> None:
    assert moving_seconds(MACHINE, 1e9, 2) == pytest.approx(
        1e9 / (1e12 * MACHINE.constants.memory) + 2 * KERNEL_SECONDS
    )


def test_experts_in_one_kernel_are_slower_than_one_product() -> None:
    assert 0.5 < GROUPED < 1.0


TABLE = ((4096, 4096, 4096, 4e14), (16384, 8192, 8192, 6e14), (512, 1024, 1024, 3e13))
MEASURED = replace(
    DEVICE, measured=True, matmul_shapes={"bfloat16": TABLE}, matmul_flops={"bfloat16": 6e14}, kernel_seconds=5e-6,
    update_rate=5e10, pass_rates=((1e6, 6e12), (1e9, 2e12)),
)  # fmt: skip


def measured_machine(**given: Any) -> Machine:
    device = replace(MEASURED, **given)
    return Machine(device, constants_of(device))


def test_an_accelerators_measured_products_take_what_was_measured() -> None:
    machine = measured_machine()
    for rows, into, out, rate in TABLE:
        seconds = matmul_seconds(machine, rows, out, into, "bfloat16")
        assert seconds == pytest.approx(2 * rows * into * out / rate + KERNEL_SECONDS, rel=1e-4)
    twice = replace(MEASURED, matmul_shapes={"bfloat16": tuple((m, k, n, rate / 2) for m, k, n, rate in TABLE)})
    slow = Machine(twice, machine.constants)
    for rows, out, into, batch in ((5000, 3000, 2048, 1), (300, 4096, 1024, 8)):
        fast = matmul_seconds(machine, rows, out, into, "bfloat16", batch) - KERNEL_SECONDS
        assert matmul_seconds(slow, rows, out, into, "bfloat16", batch) - KERNEL_SECONDS == pytest.approx(2 * fast)


def test_a_precision_that_nobody_measured_keeps_the_roofline() -> None:
    machine, bare = measured_machine(), measured_machine(matmul_shapes={})
    assert matmul_seconds(machine, 999, 512, 512, "float32") == matmul_seconds(bare, 999, 512, 512, "float32")
    assert matmul_seconds(machine, 999, 512, 512, "bfloat16") != matmul_seconds(bare, 999, 512, 512, "bfloat16")


def test_an_accelerators_measured_passes_kernels_and_update_are_taken() -> None:
    machine = measured_machine()
    assert moving_seconds(machine, 2e6, 1) == pytest.approx(2e6 / 6e12 + KERNEL_SECONDS)
    assert moving_seconds(machine, 4e9, 2) == pytest.approx(4e9 / 2e12 + 2 * KERNEL_SECONDS)
    assert measured_machine(kernel_seconds=1e-6).floor == 1e-6
    rest = moving_seconds(machine, 6 * 1e9, 10)
    assert update_seconds(machine, 1e9) == pytest.approx(1e9 / 5e10 + rest)
    assert update_seconds(MACHINE, 1e9) == moving_seconds(MACHINE, UPDATE_BYTES * 1e9, 10)
    unmeasured = measured_machine(measured=False)
    assert moving_seconds(unmeasured, 2e6) == pytest.approx(2e6 / unmeasured.bandwidth + KERNEL_SECONDS)
