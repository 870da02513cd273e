"""Cross-entropy over a large vocabulary, without holding the logits of all positions at once.

The logits of a language model's last layer, [positions, vocabulary], and their gradient are often the largest tensors
of a step. Here they are computed for some positions at a time, and again in the backward: instead of
2 * positions * vocabulary numbers a step holds 2 * chunk * vocabulary, for a third more work in that layer.

Source: the idea of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), with plain
torch operations on chunks of positions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional

CHUNK = 1024
IGNORED = -100


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = CHUNK,
    ignore_index: int = IGNORED,
    reduction: Literal["sum", "none"] = "sum",
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), targets)`, its logits computed for `chunk` positions at a time.

    Under autocast the products run in its type, logits and losses are float32. It can be differentiated once. Call it
    inside the forward of the module that owns `weight`, as `ChunkedHead` does: outside of it a sharded layout has
    parts of the weight only.

    Args:
        hidden: [..., channels], floating.
        weight: [vocabulary, channels].
        targets: whole numbers [...], below the vocabulary or `ignore_index`, whose loss is 0.
        bias: [vocabulary].
        chunk: positions, at least 1.
        reduction: the sum over all positions, 0-dim, or the loss of each, [...].

    Raises:
        ValueError: shapes that do not fit, or a chunk below 1.
    """
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: expected [..., channels], [vocabulary, channels] and [...]")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: expected at least 1 position")
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    operands = hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets
    losses: torch.Tensor = _Chunked.apply(*operands, chunk, ignore_index, compute)  # type: ignore[no-untyped-call]
    return losses.sum() if reduction == "sum" else losses


@final
class ChunkedHead(nn.Linear):
    """A last layer that gives losses instead of logits where it is told the targets; otherwise an `nn.Linear`.

    Args:
        chunk: positions whose logits are held at once.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False, *, chunk: int = CHUNK) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.chunk = chunk

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """[..., channels] -> logits [..., vocabulary]; with `targets` [...] the loss of each position, [...]."""
        if targets is None:
            return super().forward(hidden)
        return chunked_cross_entropy(hidden, self.weight, targets, bias=self.bias, chunk=self.chunk, reduction="none")


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        ignore_index: int,
        compute: torch.dtype,
    ) -> torch.Tensor:
        ctx.chunk, ctx.ignore_index, ctx.compute = chunk, ignore_index, compute
        wide = _wide(compute)
        sums = hidden.new_empty(len(hidden), dtype=wide)  # log of the sum of exponentials
        # Not a view in the end: FSDP hangs its own backward on the output, and would lose it with a view.
        losses = hidden.new_empty(targets.shape, dtype=wide)
        flat, places = losses.view(-1), targets.reshape(-1)
        with _exactly(hidden):
            low = weight.to(compute)
            for part in _parts(len(hidden), chunk):
                logits = _logits(hidden[part], low, bias, wide)
                valid = places[part] != ignore_index
                picked = logits.gather(1, torch.where(valid, places[part], 0).unsqueeze(1)).squeeze(1)
                sums[part] = logits.logsumexp(1)
                flat[part] = torch.where(valid, sums[part] - picked, 0.0)
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked for a graph of the gradient: without one a penalty on it would be lost
            raise RuntimeError("chunked_cross_entropy can be differentiated once: use cross_entropy on whole logits")
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        targets, gradient = targets.reshape(-1), gradient.reshape(-1)
        wide = sums.dtype
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        with _exactly(hidden):
            low = weight.to(ctx.compute)
            for part in _parts(len(hidden), ctx.chunk):
                valid = targets[part] != ctx.ignore_index
                of_logits = (_logits(hidden[part], low, bias, wide) - sums[part].unsqueeze(1)).exp_()
                place = torch.where(valid, targets[part], 0).unsqueeze(1)
                of_logits.scatter_add_(1, place, torch.full_like(place, -1.0, dtype=wide))
                of_logits *= torch.where(valid, gradient[part], 0.0).unsqueeze(1)
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
                lowered = of_logits.to(ctx.compute)
                if of_hidden is not None:
                    of_hidden[part] = (lowered @ low).to(of_hidden.dtype)
                if of_weight is not None:
                    of_weight += lowered.t() @ hidden[part].to(ctx.compute)
        found = (of_weight, weight), (of_bias, bias)
        of_parameters = (None if value is None else value.to(like.dtype) for value, like in found)
        return of_hidden, *of_parameters, None, None, None, None


def _parts(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _logits(hidden: torch.Tensor, low: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    return functional.linear(hidden.to(low.dtype), low, None if bias is None else bias.to(low.dtype)).to(wide)


def _wide(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute is torch.float64 else torch.float32


def _exactly(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The types are chosen here: autocast would choose again."""
    return torch.autocast(tensor.device.type, enabled=False)
