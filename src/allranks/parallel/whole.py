"""The user's model as one process has it: built again, uncut, to compare with."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from allranks.parallel.initial import Build
from allranks.parallel.precision import Precision

NOISE = 0.01


def shake(part: torch.Tensor, name: str, shape: Sequence[int], place: tuple[slice, ...]) -> None:
    """Add to a part of a parameter, in place, noise that depends on nothing but the name and the place in the whole.

    What is zero at the start (a projection back into the residual stream, a gate, LoRA's B) hides every gradient behind
    it: compared as it is, a wrong model would look right.
    """
    if part.is_floating_point():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)[place]
        part.add_(noise.to(part), alpha=NOISE)


@dataclass(frozen=True, slots=True)
class WholeGradients:
    """What one process computes on some samples: the loss, and the norm of each parameter's gradient by its name."""

    loss: float
    norms: dict[str, float]


def whole_gradients(
    build: Build, precision: Precision, seed: Callable[[], None], loss_of: Callable[[nn.Module], torch.Tensor]
) -> WholeGradients:
    """Build a single module under its seed, on the CPU and in evaluation mode; shake it, and run forward and backward.

    Args:
        build: the user's `model()`.
        precision: its parameters' dtype; the forward runs in it.
        seed: seeds the generators.
        loss_of: the loss that this module has.
    """
    seed()
    module = build()
    assert isinstance(module, nn.Module), "several modules have a step() of their own, which this is not asked for"
    module = (module.double() if precision.parameters is torch.float64 else module.float()).eval()
    for name, parameter in module.named_parameters():
        shake(parameter.detach(), name, parameter.shape, tuple(slice(None) for _ in parameter.shape))
    loss = loss_of(module)
    loss.backward()
    norms = {
        name: float(torch.linalg.vector_norm(parameter.grad)) if parameter.grad is not None else 0.0
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return WholeGradients(float(loss.detach()), norms)
