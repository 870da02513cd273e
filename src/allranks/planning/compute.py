"""Seconds of one kernel on one device: matrix products, fused attention, and what the memory's bandwidth bounds."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import final

from allranks.cluster import Device
from allranks.planning.constants import AttentionKernel, Constants
from allranks.planning.processor import is_processor, pass_rate, passing_seconds, product_seconds

KERNEL_SECONDS = 2.5e-6
"""A kernel on a GPU takes this long at least: start, first loads and last stores (measured by many; NVIDIA's CUDA C++
Best Practices Guide gives 2 to 5 us)."""

# Output tiles of cuBLAS and CUTLASS kernels, and what a tile of that size reaches of the largest one's rate.
# Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (tile and wave
# quantization; smaller tiles load more per product).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
UPDATE_BYTES, FUSED_BYTES = 34.0, 28.0
"""Read and written per parameter by an update: gradient, weight and two moments read, three of them written (28, the
fused kernel of torch.optim.AdamW), the copy in lower precision, and the gradient once more for the norm."""
NEAREST = 0.01
"""A distance in powers of two at which a product counts as the measured one."""
GROUPED = 0.8
"""What a product of many experts in one kernel reaches of one product's rate (MegaBlocks 2211.15841, figure 9, and
calibration)."""
UNALIGNED, UNALIGNED_BATCH = 2.0, 8.0
"""By how much a product is slower whose rows are no multiple of 16 bytes: one large product, and the batched ones of
heads. NVIDIA's guide (tensor core requirements); BLOOM's chronicles: heads of 108 features make a step 1.4 times as
long as heads of 144; nanoGPT pads 50257 words to 50304 for a quarter of a small model's step."""


@final
@dataclass(frozen=True, slots=True)
class Machine:
    """A device with its constants, as rates: FLOP/s and bytes/s."""

    device: Device
    constants: Constants

    def peak(self, precision: str) -> float:
        """Dense FLOP/s of the data sheet; a precision that the device lacks runs in the next wider one it has."""
        order = ("float4", "float8", "bfloat16", "float16", "float32", "float64")
        start = order.index(precision) if precision in order else 2
        for name in order[start:]:
            if self.device.peak_flops.get(name):
                return self.device.peak_flops[name]
        return max(self.device.peak_flops.values())

    def rate(self, precision: str) -> float:
        """FLOP/s of a large matrix product in training."""
        low = precision in ("float8", "float4")
        return self.peak(precision) * (self.constants.matmul_low if low else self.constants.matmul)

    @property
    def bandwidth(self) -> float:
        """Bytes/s of elementwise kernels."""
        return self.device.memory_bandwidth * self.constants.memory

    @property
    def floor(self) -> float:
        """The least seconds of a kernel on the device: a measured row of them bounds it from above, for there the host
        may be the slower one."""
        return min(KERNEL_SECONDS, self.device.kernel_seconds or KERNEL_SECONDS)


def matmul_seconds(
    machine: Machine, rows: float, out: float, into: float, precision: str, batch: float = 1.0,
    features: tuple[float, float] | None = None,
) -> float:  # fmt: skip
    """`batch` products of rows x into and into x out: the roofline, with whole tiles and whole waves.

    Williams et al., Roofline (2009), and NVIDIA's Matrix Multiplication Background User's Guide (tile and wave
    quantization). `batch` are the independent products of one kernel (experts, heads). `features` are the sizes that
    lie together in memory, whose rows are to be whole multiples of 16 bytes: out and into, but those of the weight
    where its gradient is made, for then `into` counts positions.
    """
    if rows <= 0 or out <= 0 or into <= 0:
        return 0.0
    if is_processor(machine.device):
        return product_seconds(machine.device, rows, out, into, precision, batch)
    flops = 2.0 * rows * out * into * batch
    if any(_width(precision) * size % 16 for size in features or (out, into)):
        flops *= UNALIGNED_BATCH if batch > 1 else UNALIGNED
    rate, bandwidth = machine.rate(precision), machine.bandwidth
    seconds = _roofline(machine.constants, rate, bandwidth, precision, (rows, into, out), flops, batch)
    return seconds * _measured_over(machine, precision, rows * batch, into, out) + machine.floor


def _width(precision: str) -> float:
    return {"float64": 8, "float32": 4, "float8": 1, "float4": 0.5}.get(precision, 2)


def _roofline(
    constants: Constants, rate: float, bandwidth: float, precision: str, sizes: tuple[float, float, float],
    flops: float, batch: float = 1.0,
) -> float:  # fmt: skip
    """Of products of `sizes` (rows, inner, columns), without a kernel's least time.

    The slower of computing and moving (Williams et al., Roofline, 2009); of computing the share that whole tiles in
    whole waves over the device's processors leave (NVIDIA's Matrix Multiplication Background User's Guide, tile and
    wave quantization), with the best of TILES, and the part of a tile's time that its inner features fill.
    """
    rows, into, out = sizes
    best = 0.0
    for high, wide, reached in TILES:
        tiles = -(-rows // high) * -(-out // wide) * batch
        waves = -(-tiles // constants.units)
        share = reached * rows * out * batch / (waves * constants.units * high * wide)
        best = max(best, share)
    depth = into / (into + constants.depth)
    width = _width(precision)
    moved = batch * (width * (rows * into + into * out) + max(2.0, width) * rows * out)
    return max(flops / (rate * best * depth), moved / bandwidth)


def _measured_over(machine: Machine, precision: str, rows: float, into: float, out: float) -> float:
    """What products like this took on this very device over the roofline; 1.0 where nobody measured.

    Between the shapes that `doctor --calibrate` measured by their distances in the logarithms of the three sizes
    (Shepard 1968, inverse distance weighting).
    """
    table = machine.device.matmul_shapes.get(precision, ()) if machine.device.measured else ()
    if not table:
        return 1.0
    known = _ratios(table, machine.constants, machine.rate(precision), machine.bandwidth, precision)
    weights = logarithms = 0.0
    for place, logarithm in known:
        distance = math.dist(place, (math.log2(rows), math.log2(into), math.log2(out)))
        weight = 1.0 / max(distance, NEAREST) ** 2
        weights += weight
        logarithms += weight * logarithm
    return math.exp(logarithms / weights)


@lru_cache(maxsize=64)
def _ratios(
    table: tuple[tuple[int, int, int, float], ...], constants: Constants, rate: float, bandwidth: float, precision: str
) -> tuple[tuple[tuple[float, float, float], float], ...]:
    """For each measured product the logarithms of its sizes, and that of its measured seconds over the calculated."""
    found = []
    for rows, into, out, reached in table:
        flops = 2.0 * rows * into * out
        calculated = _roofline(constants, rate, bandwidth, precision, (rows, into, out), flops)
        ratio = math.log(flops / reached / calculated)
        found.append(((math.log2(rows), math.log2(into), math.log2(out)), ratio))
    return tuple(found)


def attention_seconds(
    machine: Machine, flops: float, head_dim: float, computed: float, precision: str,
    kernel: AttentionKernel = "vendor", positions: float = 0.0,
) -> float:  # fmt: skip
    """Fused attention's forward over `flops` (both products), of which it computes the share `computed`, over so many
    positions in one kernel.

    FlashAttention-2 2307.08691: blocks that are masked as a whole are skipped; the rate rises with head_dim.
    """
    if precision in ("float8", "float4"):
        precision = "bfloat16"
    rate = machine.peak(precision) * machine.constants.attention_share(kernel, positions) * head_share(head_dim)
    return computed * flops / rate + machine.floor


def head_share(head_dim: float) -> float:
    """What head_dim leaves of attention's rate: products go in steps of 64 features, and short ones are bound by exp.

    FlashAttention-3 2407.08608, section 3: head_dim 64 reaches about three quarters of 128.
    """
    padded = -(-head_dim // 64) * 64
    return (head_dim / padded) * min(1.0, 0.5 + padded / 256)


def moving_seconds(machine: Machine, moved_bytes: float, kernels: float = 1.0) -> float:
    """Kernels that the memory's bandwidth bounds; where somebody measured passes by size, by those."""
    device = machine.device
    if is_processor(device):
        return passing_seconds(device, moved_bytes, kernels)
    measured = device.measured and device.pass_rates
    rate = pass_rate(device, moved_bytes / 2 / max(1.0, kernels)) if measured else machine.bandwidth
    return moved_bytes / rate + kernels * machine.floor


def update_seconds(machine: Machine, held: float) -> float:
    """AdamW's step over `held` parameters of a rank, with the gradients' norm: bytes, or as it was measured.

    A measured step (`update_rate`) is a fused one over float32; the norm and the copy in the lower type come to it.
    """
    rate = machine.device.update_rate if machine.device.measured else None
    if not rate:
        return moving_seconds(machine, UPDATE_BYTES * held, 10)
    return held / rate + moving_seconds(machine, (UPDATE_BYTES - FUSED_BYTES) * held, 10)
