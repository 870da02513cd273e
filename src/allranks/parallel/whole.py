"""The user's model as one process has it: built again, uncut, to compare with."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from allranks.parallel.initial import Build
from allranks.parallel.precision import Precision

NOISE = 0.01


def shake(part: torch.Tensor, name: str, shape: Sequence[int], place: tuple[slice | list[int], ...]) -> None:
    """Add to a part of a parameter, in place, noise that depends on nothing but the name and the place in the whole.

    What is zero at the start (a projection back into the residual stream, a gate, LoRA's B) hides every gradient behind
    it: compared as it is, a wrong model would look right.
    """
    if part.is_floating_point():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(tuple(shape), generator=generator, dtype=torch.float32)[place]
        part.add_(noise.to(part), alpha=NOISE)


def shake_part(part: torch.Tensor, name: str, place: tuple[slice | list[int], ...]) -> None:
    """Add to a part of a parameter, in place, noise that copies of this part have, too, and no other part.

    Unlike `shake` it costs what the part costs, however large the whole is.
    """
    if part.is_floating_point():
        generator = torch.Generator(part.device).manual_seed(zlib.crc32(f"{name} {place}".encode()))
        noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32)
        part.add_(noise.to(part), alpha=NOISE)


@dataclass(frozen=True, slots=True)
class WholeGradients:
    """What is computed on some samples.

    Attributes:
        loss: of all of them.
        norms: of each parameter's gradient, by its name.
        output: the norm of what the model returned, where it was looked at.
        draws: whether python's or numpy's generator was drawn from.
    """

    loss: float
    norms: dict[str, float]
    output: float = 0.0
    draws: bool = False


def square_of(output: object) -> torch.Tensor:
    """The sum of squares of a model's output, any pytree, 0-dim, float64, on the CPU."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    squares = [leaf.detach().double().square().sum().cpu() for leaf in leaves if leaf.is_floating_point()]
    return torch.stack([torch.zeros((), dtype=torch.float64), *squares]).sum()


def whole_gradients(
    build: Build,
    precision: Precision,
    seed: Callable[[], None],
    loss_of: Callable[[nn.Module], torch.Tensor],
    within: AbstractContextManager[object],
) -> WholeGradients:
    """Build a single module under its seed, on the CPU and in evaluation mode; shake it, and run forward and backward.

    Args:
        build: the user's `model()`.
        precision: its parameters' dtype; the forward runs in it.
        seed: seeds the generators.
        loss_of: the loss that this module has.
        within: what forward and backward run in.
    """
    seed()
    module = build()
    assert isinstance(module, nn.Module), "several modules have a step() of their own, which this is not asked for"
    module = module.double() if precision.parameters is torch.float64 else module.float()
    for name, parameter in module.named_parameters():
        shake(parameter.detach(), name, parameter.shape, tuple(slice(None) for _ in parameter.shape))
    module.eval()  # now: it may merge parameters, and has to see what they are
    with within:
        loss = loss_of(module)
        if loss.requires_grad:
            loss.backward()
    norms = {
        name: float(torch.linalg.vector_norm(parameter.grad)) if parameter.grad is not None else 0.0
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    return WholeGradients(float(loss.detach()), norms)


@contextmanager
def float32_products(device: torch.device) -> Iterator[None]:
    """No TF32 inside: cuDNN's convolutions take it where nobody asked (torch's CUDA notes), a processor never."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    kinds: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, was in zip(kinds, before, strict=True):
            kind.fp32_precision = was
