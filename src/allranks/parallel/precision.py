"""What a precision means (law 7): float32 parameters everywhere, autocast's table for what runs in the lower type."""

import platform
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from allranks.errors import ConfigError
from allranks.parallel.outputs import map_tensors
from allranks.verdict import Decision

TIMED_WIDTH = 192
"""Of the square matrices that are multiplied at the start to see how long a type takes: in all it takes some 30 ms on a
processor without instructions for float16 (AMD EPYC, 2026-11-30), where larger ones differ by more."""
TIMED_TURNS = 3  # the shortest counts: other programs only ever make one longer


@dataclass(frozen=True)
class Precision:
    """How the forward runs and how parameters are stored.

    Attributes:
        name: "float32", "bfloat16", "float16", "float8" or "float64".
        parameters: the dtype of parameters, gradients, reductions and optimizer state.
        compute: the dtype of autocast, or None where nothing is lowered.
        gather: the dtype in which FSDP gathers parameters.
    """

    name: str
    parameters: torch.dtype
    compute: torch.dtype | None
    gather: torch.dtype

    @property
    def lowers_linears(self) -> bool:
        """Whether linear layers multiply in float8 where all else runs in the lower type."""
        return self.name == "float8"

    @property
    def scales(self) -> bool:
        """Whether gradients could leave the range of the lower type, so that the loss is scaled before its backward."""
        return self.compute is torch.float16

    def autocast(self, device_type: str) -> AbstractContextManager[object]:
        """The context in which the user's forward runs."""
        return nullcontext() if self.compute is None else torch.autocast(device_type, self.compute)

    def cast_inputs(self, inputs: object) -> object:
        """Floating tensors of a pytree in float64 where that is the precision; otherwise as they came.

        Autocast lowers what it lowers by itself.
        """
        if self.parameters is not torch.float64:
            return inputs
        return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, inputs)

    def place(self, batch: object, device: torch.device) -> object:
        """The tensors of a pytree on the device, and as `cast_inputs`."""
        if device.type != "cpu":
            batch = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), batch)
        return self.cast_inputs(batch)

    def cast_output(self, output: object) -> object:
        """Floating tensors of the model's output in float32, so that `loss` never sums in 8 bits of mantissa."""
        if self.compute is None:
            return output
        low = (torch.bfloat16, torch.float16)
        return map_tensors(lambda t: t.float() if t.dtype in low else t, output)

    def fsdp_policy(self) -> MixedPrecisionPolicy:
        """FSDP2's part: what is gathered is rounded where `gather` says so; gradients keep the parameters' dtype."""
        if self.gather is self.parameters:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(param_dtype=self.gather, reduce_dtype=self.parameters, cast_forward_inputs=False)


def choose_precision(name: str, gather: str | None, device_type: str) -> Precision:
    """The Precision of `train.precision` and `layout.gather` on a device type.

    `gather` defaults to bfloat16 on CUDA under bfloat16 and float8, because it halves the traffic, and to the
    parameters' dtype elsewhere. ConfigError where the two do not go together.
    """
    parameters = torch.float64 if name == "float64" else torch.float32
    compute = {"bfloat16": torch.bfloat16, "float8": torch.bfloat16, "float16": torch.float16}.get(name)
    if gather is None:
        gather = "bfloat16" if compute is torch.bfloat16 and device_type == "cuda" else "float32"
    if gather == "bfloat16" and compute is not torch.bfloat16:
        raise ConfigError(f"layout.gather=bfloat16 with train.precision={name}: it belongs to train.precision=bfloat16")
    return Precision(name, parameters, compute, torch.bfloat16 if gather == "bfloat16" else parameters)


def warn_of_precision(precision: Precision, device_type: str) -> tuple[Decision, ...]:
    """Say where a precision takes longer than float32 instead of less: of float16 how long, as timed here and now."""
    if precision.lowers_linears and device_type == "cpu":
        return (Decision("warning: float8 takes longer than float32 here", "the CPU emulates it: it is a rehearsal"),)
    if not precision.scales or device_type != "cpu" or _has_half_instructions():
        return ()
    times, others = times_of_float32()
    if times <= 1:
        return ()
    what = f"warning: float16 takes about {times:.0f} times as long as float32 here"
    timed = f"products of {TIMED_WIDTH} by {TIMED_WIDTH} were timed just now, larger ones may differ by more"
    return (Decision(what, f"{timed}; bfloat16 takes {others:.1f} times as long"),)


def times_of_float32() -> tuple[float, float]:
    """How many times as long as in float32 a small product takes in float16 and in bfloat16 on this processor."""
    best = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), float("inf"))
    for _ in range(TIMED_TURNS):
        for dtype in best:
            best[dtype] = min(best[dtype], _seconds_of_product(dtype))
    return best[torch.float16] / best[torch.float32], best[torch.bfloat16] / best[torch.float32]


def _seconds_of_product(dtype: torch.dtype) -> float:
    with unset_fake_temporarily(), torch.no_grad():  # a rehearsal has no tensors that take time
        matrix = torch.ones(TIMED_WIDTH, TIMED_WIDTH, dtype=dtype, device="cpu")
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        return time.perf_counter() - start


def describe_gather(precision: Precision, asked: str | None) -> tuple[Decision, ...]:
    """Say where shards are gathered in a lower type than they are kept in, which is one of law 4's exceptions.

    Args:
        asked: `layout.gather` as it was given.
    """
    if precision.gather is precision.parameters:
        return ()
    because = "layout.gather says so" if asked else f"half the traffic, under train.precision={precision.name} on GPUs"
    alone = "layout.gather=float32 rounds only what autocast does"
    return (Decision("parameters are rounded to bfloat16 where they are gathered", f"{because}; {alone}"),)


def _has_half_instructions() -> bool:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # ARM processors have had them for years
    # torch 2.11 does not tell: the warning is then said once too often, on the newest Intel processors.
    found = getattr(torch.cpu, "get_capabilities", dict[str, object])()
    return bool(found.get("avx512_fp16") or found.get("amx_fp16"))
