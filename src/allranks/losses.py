"""Cross-entropy over a large vocabulary, without holding the logits of all positions, or of all words, at once.

The logits of a language model's last layer, [positions, vocabulary], and their gradient are often the largest tensors
of a step. Here they are computed for some positions at a time, and again in the backward: instead of
2 * positions * vocabulary numbers a step holds 2 * chunk * vocabulary, for a third more work in that layer.

Where tensor parallelism cuts the vocabulary, each rank computes with the logits of its own words, and three numbers a
position are agreed over the ranks: the largest logit, the sum of exponentials, and the target's logit.

Source: the idea of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), with plain
torch operations on chunks of positions.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional

from allranks.vocabulary import CutLogits, CutVocabulary

CHUNK = 1024
IGNORED = -100


def cross_entropy(
    logits: torch.Tensor | CutLogits,
    targets: torch.Tensor,
    *,
    ignore_index: int = IGNORED,
    reduction: Literal["sum", "none"] = "sum",
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` over the last dim, for logits that may be cut over the ranks of tp.

    The same line serves every layout: with `hints().loss_parallel` nobody holds whole logits under tp, and without tp
    they are whole. It can be differentiated twice.

    Args:
        logits: [..., vocabulary], floating.
        targets: whole numbers [...], below the vocabulary or `ignore_index`, whose loss is 0.
        reduction: the sum over all positions, 0-dim, or the loss of each, [...].

    Raises:
        ValueError: shapes that do not fit.
        IndexError: a target that is no word.
    """
    shape = (logits.part if isinstance(logits, CutLogits) else logits).shape
    if shape[:-1] != targets.shape:
        raise ValueError(f"logits {list(shape)}, targets {list(targets.shape)}: expected [..., vocabulary] and [...]")
    if not isinstance(logits, CutLogits):
        flat = logits.reshape(-1, shape[-1]), targets.reshape(-1)
        found = functional.cross_entropy(*flat, ignore_index=ignore_index, reduction=reduction)
        return found if reduction == "sum" else found.view(targets.shape)
    words, part = logits.vocabulary, logits.part
    part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    here, places = words.find(targets, ignore_index)
    losses = words.log_sum(part.logsumexp(-1)) - words.sum(_pick(part, here, places))
    losses = torch.where(targets == ignore_index, 0.0, losses)
    return losses.sum() if reduction == "sum" else losses


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk: int = CHUNK,
    ignore_index: int = IGNORED,
    reduction: Literal["sum", "none"] = "sum",
    vocabulary: CutVocabulary | None = None,
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
        vocabulary: which words `weight` and `bias` have, where ranks have a part each; collective then. The gradient
            of `hidden` is that of these words.

    Raises:
        ValueError: shapes that do not fit, or a chunk below 1.
        IndexError: a target that is no word.
    """
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: expected [..., channels], [vocabulary, channels] and [...]")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: expected at least 1 position")
    kind = hidden.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    operands = hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets
    how = chunk, ignore_index, compute, vocabulary
    losses: torch.Tensor = _Chunked.apply(*operands, *how)  # type: ignore[no-untyped-call]
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
        words: CutVocabulary | None,
    ) -> torch.Tensor:
        ctx.chunk, ctx.compute = chunk, compute
        wide = _wide(compute)
        sums = hidden.new_empty(len(hidden), dtype=wide)  # log of the sum of exponentials
        # Not a view in the end: FSDP hangs its own backward on the output, and would lose it with a view.
        losses = hidden.new_empty(targets.shape, dtype=wide)
        picked, valid = losses.view(-1), targets.reshape(-1) != ignore_index
        here, places = _find(targets.reshape(-1), ignore_index, words)
        with _exactly(hidden):
            low = weight.to(compute)
            for part in _parts(len(hidden), chunk):
                logits = _logits(hidden[part], low, bias, wide)
                sums[part] = logits.logsumexp(1)
                picked[part] = _pick(logits, here[part], places[part])
        if words is not None:  # once for all chunks
            sums = words.log_sum(sums)
            picked.copy_(words.sum(picked))
        picked.copy_(torch.where(valid, sums - picked, 0.0))
        ctx.save_for_backward(hidden, weight, bias, valid, here, places, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # asked for a graph of the gradient: without one a penalty on it would be lost
            raise RuntimeError("chunked_cross_entropy can be differentiated once: use cross_entropy on whole logits")
        hidden, weight, bias, valid, here, places, sums = ctx.saved_tensors
        gradient = torch.where(valid, gradient.reshape(-1), 0.0).unsqueeze(1)
        wide = sums.dtype
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        with _exactly(hidden):
            low = weight.to(ctx.compute)
            for part in _parts(len(hidden), ctx.chunk):
                of_logits = (_logits(hidden[part], low, bias, wide) - sums[part].unsqueeze(1)).exp_()
                if len(weight):
                    of_logits.scatter_add_(1, places[part].unsqueeze(1), -here[part].unsqueeze(1).to(wide))
                of_logits *= gradient[part]
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
                lowered = of_logits.to(ctx.compute)
                if of_hidden is not None:
                    of_hidden[part] = (lowered @ low).to(of_hidden.dtype)
                if of_weight is not None:
                    of_weight += lowered.t() @ hidden[part].to(ctx.compute)
        found = (of_weight, weight), (of_bias, bias)
        of_parameters = (None if value is None else value.to(like.dtype) for value, like in found)
        return of_hidden, *of_parameters, None, None, None, None, None


def _find(targets: torch.Tensor, ignored: int, words: CutVocabulary | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which targets are words of this rank, and their places among them."""
    if words is not None:
        return words.find(targets, ignored)
    valid = targets != ignored
    return valid, torch.where(valid, targets, 0)


def _pick(logits: torch.Tensor, here: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The logits [...] of the targets that are words of this rank, 0 for others."""
    if not logits.shape[-1]:
        return logits.sum(-1)
    return torch.where(here, logits.gather(-1, places.unsqueeze(-1)).squeeze(-1), 0.0)


def _parts(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _logits(hidden: torch.Tensor, low: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    return functional.linear(hidden.to(low.dtype), low, None if bias is None else bias.to(low.dtype)).to(wide)


def _wide(compute: torch.dtype) -> torch.dtype:
    return torch.float64 if compute is torch.float64 else torch.float32


def _exactly(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The types are chosen here: autocast would choose again."""
    return torch.autocast(tensor.device.type, enabled=False)
