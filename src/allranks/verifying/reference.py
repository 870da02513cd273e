"""What one device computes: a plain torch loop that knows nothing of parallel/, training/ or data/.

One forward and one backward over the whole global batch, the loss divided once by its number of targets, torch's own
clipping and optimizer. Everything distributed is compared with this.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the plain loop.

    Attributes:
        loss: per target.
        norm: before clipping.
        gradients: before clipping, of every parameter that got one.
        parameters: after the update, frozen ones too.
        buffers: those of floating numbers, after the step; {} where no two ranks need have the same.
    """

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    buffers: Buffers = field(default_factory=dict)


def plain_loop(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    batches: Iterable[tuple[Any, int]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float | None = None,
    factors: Callable[[int], float] = lambda step: 1.0,
    finish: Callable[[nn.Module], None] = lambda model: None,
) -> list[ReferenceStep]:
    """Train `model` in place on whole global batches.

    Args:
        batches: (batch, number of targets) of every step.
        forward: (model, batch) -> the SUM of the loss over the batch's targets.
        max_norm: clip to this norm, or None.
        factors: step -> factor on the optimizer's learning rate.
        finish: what the user's own loop does with the model after each update.
    """
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    peaks = [group["lr"] for group in optimizer.param_groups]
    steps = []
    for index, (batch, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = forward(model, batch) / max(1, targets)
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factors(index)
        optimizer.step()
        finish(model)
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        steps.append(ReferenceStep(float(loss.detach()), float(norm), gradients, parameters, floating_buffers(model)))
    return steps


def floating_buffers(model: nn.Module) -> Buffers:
    """A copy of each buffer of floating numbers; whole numbers count forwards, which depends on the cut."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


@dataclass(frozen=True)
class ScaledStep:
    """One step of the plain loop in float16.

    Attributes:
        scale: of the loss, that the step used.
        skipped: whether it left everything as it was.
        parameters: after it.
    """

    scale: float
    skipped: bool
    parameters: dict[str, torch.Tensor]


def scaled_loop(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: Iterable[tuple[Sequence[Any], int]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
    max_norm: float | None = None,
    expected: Sequence[int] = (),
) -> list[ScaledStep]:
    """Train in float16 with torch's own autocast and scaler, where each rank's share of a step rounds by itself.

    Args:
        steps: of every step the batch of each rank, and the step's number of targets.
        forward: (model, batch) -> the SUM of the loss over the batch's targets, in float32.
        expected: by what the losses of each step are divided before their backward, where that is not its targets.
    """
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    kind = next(model.parameters()).device.type
    scaler, found = torch.amp.GradScaler(kind), []
    for index, (batches, targets) in enumerate(steps):
        optimizer.zero_grad()
        divisor = max(1, expected[index] if expected else targets)
        scale = scaler.get_scale() if scaler._scale is not None else 2.0**16
        for batch in batches:
            with torch.autocast(kind, torch.float16):
                loss = forward(model, batch)
            scaler.scale(loss / divisor).backward()
        scaler.unscale_(optimizer)
        for gradient in (p.grad for p in model.parameters() if p.grad is not None and expected):
            gradient.mul_(divisor / max(1, targets))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        found.append(ScaledStep(scale, scaler.get_scale() < scale, parameters))
    return found


def rankwise_loop(
    model: nn.Module,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: Iterable[tuple[Sequence[Sequence[Any]], int]],
    forward: Callable[[nn.Module, Any], torch.Tensor],
    num_ranks: int,
) -> tuple[list[ReferenceStep], list[Buffers]]:
    """The same, where each of `num_ranks` sees its own samples only and keeps buffers of its own (BatchNorm local).

    One model stands for all of them: before a rank's forward its buffers are put in.

    Args:
        steps: of every step, micro-step by micro-step, the batch of each rank (None: it has none), and the step's
            number of targets.

    Returns:
        The steps, without buffers, and those of each rank at the end. With `layout.batchnorm=broadcast` those of rank 0
        are everybody's: no forward in training depends on them.
    """
    named = dict(model.named_buffers())
    buffers = [{name: buffer.clone() for name, buffer in named.items()} for _ in range(num_ranks)]

    def forward_all(model: nn.Module, micro_steps: Sequence[Sequence[Any]]) -> torch.Tensor:
        losses = []
        for batches in micro_steps:
            for own, batch in zip(buffers, batches, strict=True):
                if batch is not None:
                    _put(own, named)
                    losses.append(forward(model, batch))
                    _put(named, own)
        return torch.stack(losses).sum()

    found = plain_loop(model, make_optimizer, steps, forward_all)
    return [replace(step, buffers={}) for step in found], buffers


def _put(source: Buffers, target: Buffers) -> None:
    for name, value in source.items():
        # Through .data: backwards that are still to come may have saved the buffer.
        target[name].data.copy_(value)
