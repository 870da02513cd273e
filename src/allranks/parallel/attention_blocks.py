"""Attention of some queries over some keys, with what it takes to merge it with that over other keys.

Beside the output there is each query's logarithm of the sum of exponentials. torch's fused kernels give it, under names
that torch may change: where one does not fit, plain products do the same with a matrix of scores.
"""

import math
from typing import Any

import torch

aten = torch.ops.aten
LARGEST_HEAD = 256  # channels that the flash kernel on CUDA takes
AMPERE = 8, 0  # what FlashAttention wants of a GPU
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [batch, heads, queries, channels], and logsumexp of the scores [batch, heads, queries].

    The second is in float32 at least.

    Args:
        query: [batch, heads, queries, channels].
        key, value: [batch, key heads, keys, channels]; key heads divide heads.
        causal: query i sees keys 0 to i.
        scale: of the scores; None: one over the root of the channels.
    """
    key, value = _for_heads(key, query), _for_heads(value, query)
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    if _kernel(query, value) == "cpu":
        output, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
        return output, log_sum
    if _kernel(query, value) == "cuda":
        output, log_sum, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return output, log_sum
    scores = _scores(query, key, causal, scale)
    log_sum = scores.logsumexp(-1)
    weights = torch.exp(scores - log_sum.unsqueeze(-1))
    return (weights @ value.to(weights.dtype)).to(query.dtype), log_sum


def attend_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> Gradients:
    """This block's part of the gradients of query, key and value, shaped as these.

    Args:
        gradient: of the merged output.
        output, log_sum: merged over all keys, not this block's alone.
    """
    heads = key.shape[1]
    wide_key, wide_value = _for_heads(key, query), _for_heads(value, query)
    scale = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    tensors = gradient, query, wide_key, wide_value, output, log_sum
    kernel = _kernel(query, value)
    found: Any
    if kernel == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal, scale=scale)
    elif kernel == "cuda":
        unused = torch.zeros((), dtype=torch.int64, device=query.device)  # the state of a dropout that there is not
        lengths = None, None, query.shape[-2], key.shape[-2]
        # The kernel takes the sums for dense, whatever their strides (as torch's own ring says: _attention.py).
        found = aten._scaled_dot_product_flash_attention_backward(
            *tensors[:-1], log_sum.contiguous(), *lengths, 0.0, causal, unused, unused, scale=scale
        )
    else:
        found = _plain_backward(*tensors, causal=causal, scale=scale)
    of_query, of_key, of_value = found
    return of_query, _sum_heads(of_key, heads), _sum_heads(of_value, heads)


def _plain_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> Gradients:
    weights = torch.exp(_scores(query, key, causal, scale) - log_sum.unsqueeze(-1))
    wide = gradient.to(weights.dtype)
    of_weights = wide @ value.to(weights.dtype).mT
    mean = (wide * output.to(weights.dtype)).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean) * scale
    found = of_scores @ key.to(weights.dtype), of_scores.mT @ query.to(weights.dtype), weights.mT @ wide
    return found[0].to(query.dtype), found[1].to(key.dtype), found[2].to(value.dtype)


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(hidden, -math.inf)


def _kernel(query: torch.Tensor, value: torch.Tensor) -> str:
    """Whose fused kernel takes these: "cpu", "cuda", or "" for none."""
    channels = query.shape[-1]
    if value.shape[-1] != channels:
        return ""
    if query.device.type == "cpu":
        return "cpu"
    fits = query.dtype in (torch.float16, torch.bfloat16) and channels % 8 == 0 and channels <= LARGEST_HEAD
    if query.device.type != "cuda" or not fits:
        return ""
    return "cuda" if torch.cuda.get_device_capability(query.device) >= AMPERE else ""


def _for_heads(part: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    times = query.shape[1] // part.shape[1]
    return part if times == 1 else part.repeat_interleave(times, 1)


def _sum_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
