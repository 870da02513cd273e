"""What one device computes and moves: matrix products by shape and precision, memory, a kernel's least time, AdamW."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from allranks.profiling.rounds import Case

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
QUICK_PRECISIONS = ("float32", "bfloat16")

# (rows, inner, columns): as many tokens, by the two widths of a layer.
CPU_SHAPES = tuple(
    (rows, inner, columns)
    for inner, columns in ((256, 256), (1024, 1024), (1024, 4096), (4096, 1024))
    for rows in (16, 128, 1024)
)
CPU_QUICK_SHAPES = ((64, 256, 256), (256, 512, 512), (256, 1024, 1024))
GPU_SHAPES = tuple(
    (rows, inner, columns)
    for inner, columns in ((1024, 1024), (4096, 4096), (4096, 16384), (16384, 4096), (8192, 8192))
    for rows in (512, 4096, 16384)
)
GPU_QUICK_SHAPES = ((4096, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))

MEBI = 2**20
PASSES = (1 / 16, 1 / 2, 4, 32)
"""MiB of a result that an elementwise operation makes on a processor: what its caches hold, and what they do not."""


def compute_cases(device: torch.device, *, quick: bool) -> Iterator[Case]:
    """The cases of one device, with keys ("matmul", precision, rows, inner, columns), ("copy", bytes), ("kernel",),
    ("update", parameters), on a processor ("pass", bytes), and on a GPU ("host", bytes): pinned host memory to it.

    What they work on is made here, and kept until they are dropped.
    """
    on_gpu = device.type == "cuda"
    yield Case(("kernel",), _kernel(device), needed=True)
    copied = (1024 if on_gpu else 128) * MEBI // (4 if quick else 1)
    yield Case(("copy", copied), _copy(device, copied), needed=True)
    updated = (64 if on_gpu else 4) * MEBI // (4 if quick else 1)
    yield Case(("update", updated), _update(device, updated), needed=True)
    if not on_gpu:
        for size in PASSES[1:3] if quick else PASSES:
            yield Case(("pass", int(size * MEBI)), _pass(int(size * MEBI)))
    if on_gpu:
        yield Case(("host", copied), _from_host(device, copied), needed=True)
    shapes = (GPU_QUICK_SHAPES if quick else GPU_SHAPES) if on_gpu else (CPU_QUICK_SHAPES if quick else CPU_SHAPES)
    for precision in QUICK_PRECISIONS if quick else PRECISIONS:
        weights: dict[tuple[int, int], torch.Tensor] = {}
        for rows, inner, columns in shapes:
            if (inner, columns) not in weights:
                dtype = PRECISIONS[precision]
                weights[inner, columns] = torch.full((columns, inner), 1 / inner, dtype=dtype, device=device)
            yield Case(("matmul", precision, rows, inner, columns), _product(rows, weights[inner, columns]))


def _product(rows: int, weight: torch.Tensor) -> Callable[[], object]:
    """As a linear layer multiplies; the memory of the result is part of the work, as it is there."""
    given = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    return lambda: functional.linear(given, weight)


def _copy(device: torch.device, num_bytes: int) -> Callable[[], object]:
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _pass(num_bytes: int) -> Callable[[], object]:
    source = torch.ones(num_bytes // 4)
    return lambda: source * 2


def _kernel(device: torch.device) -> Callable[[], object]:
    one = torch.zeros(1, device=device)
    return lambda: one.add_(0)


def _update(device: torch.device, num_parameters: int) -> Callable[[], object]:
    parameter = torch.zeros(num_parameters, device=device, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    return torch.optim.AdamW([parameter], fused=True).step


def _from_host(device: torch.device, num_bytes: int) -> Callable[[], object]:
    source = torch.zeros(num_bytes // 4, pin_memory=True)
    target = torch.empty(num_bytes // 4, device=device)
    return lambda: target.copy_(source, non_blocking=True)
