"""Seconds of one kernel on one device: matrix products, fused attention, and what the memory's bandwidth bounds."""

from dataclasses import dataclass
from typing import final

from allranks.cluster import Device
from allranks.planning.constants import AttentionKernel, Constants
from allranks.planning.processor import is_processor, passing_seconds, product_seconds

KERNEL_SECONDS = 2.5e-6
"""A kernel on a GPU takes this long at least: start, first loads and last stores (measured by many; NVIDIA's CUDA C++
Best Practices Guide gives 2 to 5 us)."""

# Output tiles of cuBLAS and CUTLASS kernels, and what a tile of that size reaches of the largest one's rate.
# Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/ (tile and wave
# quantization; smaller tiles load more per product).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.6))
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
    units = machine.constants.units
    best = 0.0
    for high, wide, reached in TILES:
        tiles = -(-rows // high) * -(-out // wide) * batch
        waves = -(-tiles // units)
        share = reached * rows * out * batch / (waves * units * high * wide)
        best = max(best, share)
    depth = into / (into + machine.constants.depth)
    flops = 2.0 * rows * out * into * batch
    width = {"float64": 8, "float32": 4, "float8": 1, "float4": 0.5}.get(precision, 2)
    moved = batch * (width * (rows * into + into * out) + max(2.0, width) * rows * out)
    if any(width * size % 16 for size in features or (out, into)):
        flops *= UNALIGNED_BATCH if batch > 1 else UNALIGNED
    return max(flops / (machine.rate(precision) * best * depth), moved / machine.bandwidth) + KERNEL_SECONDS


def attention_seconds(
    machine: Machine, flops: float, head_dim: float, causal: bool, precision: str, kernel: AttentionKernel = "vendor"
) -> float:
    """Fused attention's forward over `flops` (both products, over all positions).

    FlashAttention-2 2307.08691: causal attention skips the blocks above the diagonal; the rate rises with head_dim.
    """
    if precision in ("float8", "float4"):
        precision = "bfloat16"
    done = flops * (0.5 if causal else 1.0)
    rate = machine.peak(precision) * machine.constants.attention_share(kernel) * head_share(head_dim)
    return done / rate + KERNEL_SECONDS


def head_share(head_dim: float) -> float:
    """What head_dim leaves of attention's rate: products go in steps of 64 features, and short ones are bound by exp.

    FlashAttention-3 2407.08608, section 3: head_dim 64 reaches about three quarters of 128.
    """
    padded = -(-head_dim // 64) * 64
    return (head_dim / padded) * min(1.0, 0.5 + padded / 256)


def moving_seconds(machine: Machine, moved_bytes: float, kernels: float = 1.0) -> float:
    """Kernels that the memory's bandwidth bounds."""
    if is_processor(machine.device):
        return passing_seconds(machine.device, moved_bytes, kernels)
    return moved_bytes / machine.bandwidth + kernels * KERNEL_SECONDS
