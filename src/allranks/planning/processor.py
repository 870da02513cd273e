"""Seconds of one kernel in a process that computes on a measured processor: every rate is one of its calibration."""

import math
from functools import lru_cache
from itertools import pairwise

from allranks.cluster import Device

NEAREST = 2.0
"""Power of the distance by which a measured product counts less (Shepard 1968, inverse distance weighting)."""


def is_processor(device: Device) -> bool:
    """Whether it is a processor's share whose figures `doctor --calibrate` measured."""
    return device.measured and device.name == "cpu" and bool(device.matmul_shapes)


def product_seconds(device: Device, rows: float, out: float, into: float, precision: str, batch: float = 1.0) -> float:
    """`batch` products of rows x into and into x out, at the rate of the measured products nearest in shape.

    What was measured holds loads, stores and the memory of the result: no tiles and no waves are left to count.
    """
    if rows <= 0 or out <= 0 or into <= 0:
        return 0.0
    return 2.0 * rows * out * into * batch / product_rate(device, rows, into, out, precision) + floor(device)


def product_rate(device: Device, rows: float, inner: float, columns: float, precision: str) -> float:
    """FLOP/s between the measured shapes, weighted by their distances in the logarithms of the three sizes."""
    table = device.matmul_shapes.get(precision) or device.matmul_shapes.get("float32")
    table = table or next(iter(device.matmul_shapes.values()))
    return _between(table, round(math.log2(rows), 3), round(math.log2(inner), 3), round(math.log2(columns), 3))


@lru_cache(maxsize=4096)
def _between(table: tuple[tuple[int, int, int, float], ...], rows: float, inner: float, columns: float) -> float:
    """The mean of the measured products' times, each weighted by its distance (inverse distances: Shepard 1968)."""
    weights = seconds = 0.0
    for m, k, n, rate in table:
        distance = math.dist((rows, inner, columns), (math.log2(m), math.log2(k), math.log2(n)))
        if distance < 1e-2:
            return rate
        weight = distance**-NEAREST
        weights += weight
        seconds += weight / rate
    return weights / seconds


def passing_seconds(device: Device, moved_bytes: float, kernels: float) -> float:
    """Elementwise kernels: what a cache holds goes at the rate that was measured with tensors of that size."""
    each = moved_bytes / 2 / max(1.0, kernels)
    return moved_bytes / pass_rate(device, each) + kernels * floor(device)


def pass_rate(device: Device, num_bytes: float) -> float:
    """Bytes/s read and written by an operation on a tensor of `num_bytes`, between the measured sizes."""
    table = device.pass_rates
    if not table:
        return device.memory_bandwidth
    if num_bytes <= table[0][0]:
        return table[0][1]
    for (low, slow), (high, fast) in pairwise(table):
        if num_bytes <= high:
            share = math.log(num_bytes / low) / math.log(high / low)
            return slow * math.pow(fast / slow, share)
    return table[-1][1]


def floor(device: Device) -> float:
    """The least seconds of one operation, its way through torch included."""
    return device.kernel_seconds or 0.0
