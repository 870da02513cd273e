"""What a precision means (law 7): float32 parameters everywhere, autocast's table for what runs in the lower type."""

import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from allranks.errors import ConfigError
from allranks.parallel.outputs import map_tensors
from allranks.verdict import Decision

FLOAT16_TIMES = 19
"""As long as in float32 a layer 512 wide takes in float16 on an x86 processor without instructions for it, measured by
bench/precision.py on 2026-11-20 (AMD EPYC, torch 2.13.0, one thread); a layer 1024 wide takes 47 times as long."""


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
    """Say where a precision takes longer than float32 instead of less."""
    if precision.lowers_linears and device_type == "cpu":
        return (Decision("warning: float8 takes longer than float32 here", "the CPU emulates it: it is a rehearsal"),)
    if not precision.scales or device_type != "cpu" or _has_half_instructions():
        return ()
    what = f"warning: float16 takes about {FLOAT16_TIMES} times as long as float32 here"
    because = "this processor has no instructions for it (bench/precision.py has measured that); bfloat16 takes half"
    return (Decision(what, because),)


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
