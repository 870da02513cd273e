"""Kernels on a measured processor: between the shapes that were measured, and never by a GPU's tiles."""

from dataclasses import replace

import pytest

from allranks.cluster import Device
from allranks.planning.compute import Machine, matmul_seconds, moving_seconds
from allranks.planning.constants import constants_of
from allranks.planning.processor import (
    floor,
    is_processor,
    pass_rate,
    passing_seconds,
    product_rate,
    product_seconds,
)

SHAPES = ((128, 256, 256, 8e10), (128, 1024, 1024, 4e10))
CPU = Device(
    "cpu", "a core", 1e10, 1e10, {"float32": 1e11}, measured=True, matmul_shapes={"float32": SHAPES},
    kernel_seconds=4e-6, update_rate=1e9, pass_rates=((1e5, 8e10), (1e7, 2e10)),
)  # fmt: skip


def test_a_processor_is_what_was_measured_as_one() -> None:
    assert is_processor(CPU)
    assert not is_processor(replace(CPU, measured=False))
    assert not is_processor(replace(CPU, matmul_shapes={}))
    assert not is_processor(replace(CPU, name="h100"))


def test_a_measured_product_takes_what_was_measured() -> None:
    assert product_seconds(CPU, 128, 256, 256, "float32") == pytest.approx(2 * 128 * 256 * 256 / 8e10 + 4e-6)
    assert product_seconds(CPU, 0, 256, 256, "float32") == 0.0


def test_a_product_between_two_shapes_takes_the_mean_of_their_seconds_a_product() -> None:
    assert product_rate(CPU, 128, 512, 512, "float32") == pytest.approx(2 / (1 / 8e10 + 1 / 4e10))
    near = product_rate(CPU, 128, 300, 300, "float32")
    assert 2 / (1 / 8e10 + 1 / 4e10) < near < 8e10


def test_a_precision_that_nobody_measured_goes_as_float32() -> None:
    assert product_rate(CPU, 128, 256, 256, "float16") == 8e10
    other = replace(CPU, matmul_shapes={"bfloat16": SHAPES})
    assert product_rate(other, 128, 256, 256, "float64") == 8e10


def test_what_a_cache_holds_goes_faster() -> None:
    assert (pass_rate(CPU, 1e4), pass_rate(CPU, 1e5), pass_rate(CPU, 1e9)) == (8e10, 8e10, 2e10)
    assert pass_rate(CPU, 1e6) == pytest.approx(4e10)  # half way, by the logarithms
    assert pass_rate(replace(CPU, pass_rates=()), 1e6) == 1e10
    # Two kernels over 4e5 bytes: each reads and writes a tensor of 1e5.
    assert passing_seconds(CPU, 4e5, 2) == pytest.approx(4e5 / 8e10 + 2 * 4e-6)
    assert floor(replace(CPU, kernel_seconds=None)) == 0.0


def test_the_planners_kernels_ask_it() -> None:
    machine = Machine(CPU, constants_of(CPU))
    # A tile of 256 x 128 would be mostly empty.
    assert matmul_seconds(machine, 16, 64, 64, "float32") == product_seconds(CPU, 16, 64, 64, "float32")
    assert moving_seconds(machine, 4e5, 2) == passing_seconds(CPU, 4e5, 2)
    other = Machine(replace(CPU, measured=False), constants_of(CPU))
    assert matmul_seconds(other, 16, 64, 64, "float32") != product_seconds(CPU, 16, 64, 64, "float32")
