"""What a precision means (law 7): float32 parameters everywhere, autocast's table for what runs in the lower type."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from allranks.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """How the forward runs and how parameters are stored.

    Attributes:
        name: "float32", "bfloat16" or "float64".
        parameters: the dtype of parameters, gradients, reductions and optimizer state.
        compute: the dtype of autocast, or None where nothing is lowered.
        gather: the dtype in which FSDP gathers parameters.
    """

    name: str
    parameters: torch.dtype
    compute: torch.dtype | None
    gather: torch.dtype

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
        return pytree.tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype in low else t, output)

    def fsdp_policy(self) -> MixedPrecisionPolicy:
        """FSDP2's part: what is gathered is rounded where `gather` says so; gradients keep the parameters' dtype."""
        if self.gather is self.parameters:
            return MixedPrecisionPolicy(cast_forward_inputs=False)
        return MixedPrecisionPolicy(param_dtype=self.gather, reduce_dtype=self.parameters, cast_forward_inputs=False)


def choose_precision(name: str, gather: str | None, device_type: str) -> Precision:
    """The Precision of `train.precision` and `layout.gather` on a device type.

    `gather` defaults to bfloat16 on CUDA under bfloat16, because it halves the traffic, and to the parameters' dtype
    elsewhere. ConfigError for a precision that this version does not train in.
    """
    if name == "float16":
        raise ConfigError("train.precision=float16 needs a gradient scaler, which comes later: use bfloat16 or float32")
    parameters = torch.float64 if name == "float64" else torch.float32
    compute = torch.bfloat16 if name == "bfloat16" else None
    if gather is None:
        gather = "bfloat16" if compute is not None and device_type == "cuda" else "float32"
    if gather == "bfloat16" and compute is None:
        raise ConfigError(f"layout.gather=bfloat16 with train.precision={name}: it belongs to train.precision=bfloat16")
    return Precision(name, parameters, compute, torch.bfloat16 if gather == "bfloat16" else parameters)
