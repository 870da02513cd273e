"""Batch normalisation whose statistics are taken over the samples of several ranks: the mathematics and its backward.

Each rank reduces its own rows to a count, means and sums of squared distances, every rank gathers these and combines
them in the same order (Chan, Golub, LeVeque 1979): no difference of large sums in low precision, no mean of means, and
the same bits everywhere. A rank may stand aside: its rows are normalised like the others', and count for nothing.

What the ranks do together is noted, forward and backward: ranks that pass by another one would mix their statistics.

The backward (Ioffe, Szegedy, arXiv 1502.03167, section 3) sums two numbers a channel over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# torch 2.13 gives it a new name and warns of the old one; 2.11 has only that.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Statistics:
    """What the rows of all ranks have in common, a number for each channel, in float32 at least.

    Attributes:
        count: rows of all ranks, 0-dim; a row is one value of every channel.
        mean: of every channel.
        squares: the sum of squared distances from it.
    """

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor


def normalise(
    value: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    group: dist.ProcessGroup,
    counts: bool = True,
    note: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """`torch.nn.functional.batch_norm` in training, over the rows of all ranks of `group`; collective, backward too.

    Args:
        value: (samples, channels, *); each rank may have another number of rows.
        running_mean, running_var: (channels), updated in place on every rank alike, by the unbiased variance.
        weight, bias: (channels).
        counts: whether this rank's rows are part of the statistics; else they give no gradient to the others either.
        note: called just before each collective.

    Raises:
        ValueError: the world has one row only, or `value` has another number of channels than the parameters.
    """
    for known in (running_mean, running_var, weight, bias):
        if known is not None and known.numel() != value.shape[1]:
            raise ValueError(f"batch normalisation of {known.numel()} channels got an input of {list(value.shape)}")
    own_rows = value.numel() // value.shape[1] if counts else 0
    with torch.no_grad():
        note()
        found = _combine(_reduce_own(value, own_rows), value.shape[1], group)
        # Only a rank with a row of its own, or none, has to ask: the host does not wait for the device otherwise.
        total = int(found.count) if own_rows <= 1 else own_rows
        if total == 1:
            shape = list(value.shape)
            raise ValueError(f"Expected more than 1 value per channel over all ranks when training, got {shape} here")
        if total and running_mean is not None and running_var is not None:
            _update(running_mean, found.mean, momentum)
            _update(running_var, found.squares / (found.count - 1), momentum)
        # Where every rank stands aside there is nothing to normalise by.
        variance = found.squares / found.count if total else torch.ones_like(found.squares)
        inverse = torch.rsqrt(variance + eps)
    normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        value, weight, bias, found.mean, inverse, found.count, group, counts, note
    )
    return normalised


def _reduce_own(value: torch.Tensor, rows: int) -> torch.Tensor:
    """(1 + 2 * channels): the number of rows, the means, and the sums of squared distances; zeros for no row."""
    channels = value.shape[1]
    kind = torch.promote_types(value.dtype, torch.float32)
    if not rows:
        return torch.zeros(1 + 2 * channels, dtype=kind, device=value.device)
    variance, mean = torch.var_mean(value.to(kind), dim=_all_but_channels(value), correction=0)
    return torch.cat([torch.full((1,), rows, dtype=kind, device=value.device), mean, variance * rows])


def _combine(own: torch.Tensor, channels: int, group: dist.ProcessGroup) -> Statistics:
    size = dist.get_world_size(group)
    gathered = own.new_empty(size * len(own))
    _all_gather_single(gathered, own, group=group)
    counts, means, squares = gathered.view(size, -1).split([1, channels, channels], dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    return Statistics(count, mean, (squares + counts * (means - mean).square()).sum(0))


def _update(running: torch.Tensor, found: torch.Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)


def _all_but_channels(value: torch.Tensor) -> list[int]:
    return [dim for dim in range(value.ndim) if dim != 1]


def _along_channels(vector: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return vector.view([-1 if dim == 1 else 1 for dim in range(value.ndim)])


class _Normalise(Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        count: torch.Tensor,
        group: dist.ProcessGroup,
        counts: bool,
        note: Callable[[], object],
    ) -> torch.Tensor:
        ctx.save_for_backward(value, weight, mean, inverse, count)
        ctx.group, ctx.counts, ctx.note = group, counts, note
        ctx.bias_dtype = None if bias is None else bias.dtype
        factor = inverse if weight is None else inverse * weight
        found = (value - _along_channels(mean, value)) * _along_channels(factor, value)
        if bias is not None:
            found = found + _along_channels(bias, value)
        return found.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        value, weight, mean, inverse, count = ctx.saved_tensors
        gradient, dims = gradient.to(mean.dtype), _all_but_channels(value)
        centred = value - _along_channels(mean, value)
        sums = torch.stack([gradient.sum(dims), (gradient * centred).sum(dims)])
        # Parameters get what this rank's own loss says of them: whoever reduces gradients adds the others'.
        to_weight = None if weight is None else (sums[1] * inverse).to(weight.dtype)
        to_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        to_value = None
        if ctx.needs_input_grad[0]:
            # Through the statistics the loss of every rank depends on the rows of every rank that counts.
            everyones = sums.clone() if ctx.counts else torch.zeros_like(sums)
            ctx.note()
            dist.all_reduce(everyones, group=ctx.group)
            if ctx.counts:
                of_mean, of_variance = everyones[0] / count, everyones[1] * inverse.square() / count
                gradient = gradient - _along_channels(of_mean, value) - centred * _along_channels(of_variance, value)
            factor = inverse if weight is None else inverse * weight
            to_value = (gradient * _along_channels(factor, value)).to(value.dtype)
        return to_value, to_weight, to_bias, None, None, None, None, None, None
