"""Attention over a sequence of which each rank has some positions, by swapping positions for heads and back (Ulysses).

    q, k, v [..., heads, own positions, channels]
        -> all-to-all -> [..., own heads, positions, channels] -> attention -> all-to-all -> [..., heads, own positions]

Each rank sees the whole sequence of some heads, so that any mask can be honoured, and any kernel used. Source:
DeepSpeed-Ulysses (arXiv 2309.14509).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn.functional import normalize

from allranks.errors import LayoutError
from allranks.parallel.tensor_ops import gather_sum

HEADS, POSITIONS, KEYS = -3, -2, -1


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of `scaled_dot_product_attention`; query [..., heads, positions, channels] and so on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        # Attention's tensors come in many memory formats, which stack may keep.
        sent = torch.stack(value.chunk(dist.get_world_size(group), split)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(gradient, ctx.group, ctx.join, ctx.split), None, None, None


def exchange(value: torch.Tensor, group: dist.ProcessGroup, split: int, join: int) -> torch.Tensor:
    """Give each rank of `group` its part of dim `split`, and join what comes along dim `join`, in the order of ranks.

    The ranks' number divides dim `split`; both dims count from the end. The backward is the inverse.
    """
    found: torch.Tensor = _Exchange.apply(value, group, split, join)  # type: ignore[no-untyped-call]
    return found


def swap_heads(call: Call, group: dist.ProcessGroup, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
    """What `attention` makes of the whole sequence, for this rank's positions: the r-th of equal chunks.

    Keys and values of fewer heads than ranks are repeated: several ranks then have the same.

    Args:
        group: the ranks that share the sequence.
        attention: torch's own `scaled_dot_product_attention`.

    Raises:
        LayoutError: the ranks do not divide the heads; or a mask tells of this rank's positions alone.
    """
    size = dist.get_world_size(group)
    check_heads(call.query, size)
    query = exchange(call.query, group, HEADS, POSITIONS)
    key, value = (exchange(_repeat(part, size), group, HEADS, POSITIONS) for part in (call.key, call.value))
    mask = None if call.attn_mask is None else whole_mask(call, call.attn_mask, group)
    output = attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
    )
    return exchange(output, group, POSITIONS, HEADS)


def attend_alone(call: Call) -> torch.Tensor:
    """In place of attention: what each position makes of its own query, key, value and row or column of the mask.

    It tells rotated queries and keys apart, as attention does, but no position learns of another one.

    Returns:
        [..., heads, positions, channels of value], in the type of value.
    """
    positions = call.query.shape[POSITIONS]
    seen = 1 + _weigh(call.query)
    if call.key.shape[POSITIONS] != positions:
        return seen.expand(*seen.shape[:-1], call.value.shape[KEYS]).to(call.value.dtype)
    key, value = call.key, call.value
    if call.enable_gqa:
        heads = call.query.shape[HEADS]
        key, value = (part.repeat_interleave(heads // part.shape[HEADS], HEADS) for part in (key, value))
    return value * (seen + _weigh(key) + _own_mask(call.attn_mask, positions)).to(value.dtype)


def _weigh(part: torch.Tensor) -> torch.Tensor:
    """A number of the order of 1 a position, [..., positions, 1]: of its direction, which a rotation changes."""
    part = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    weights = torch.linspace(0.5, 1.5, part.shape[-1], dtype=part.dtype, device=part.device)
    return (normalize(part, dim=-1) * weights).sum(-1, keepdim=True).mul(2).tanh()


def _own_mask(mask: torch.Tensor | None, positions: int) -> torch.Tensor | float:
    """What a mask says of each own position alone, [..., positions, 1]; 0 where it is of all or of pairs."""
    if mask is None or mask.ndim < -POSITIONS:
        return 0.0
    of_queries, of_keys = (mask.shape[dim] == positions for dim in (POSITIONS, KEYS))
    if of_queries == of_keys:
        return 0.0
    told = mask.to(torch.get_default_dtype()).sigmoid().mean(KEYS if of_queries else POSITIONS, keepdim=True)
    return (
        told.mean(KEYS, keepdim=True) if of_queries else told.mean(POSITIONS, keepdim=True).transpose(POSITIONS, KEYS)
    )


def check_heads(query: torch.Tensor, size: int) -> None:
    """Refuse heads that `size` ranks cannot share. Raises LayoutError."""
    if query.ndim < -HEADS:
        raise LayoutError(f"attention over {list(query.shape)} has no heads, which cp({size}) could share: use cp=1")
    heads = query.shape[HEADS]
    if heads % size:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise LayoutError(
            f"cp({size}) does not divide the {heads} attention heads of a process: cp can be {fits}, or any number "
            "with layout.context=ring"
        )


def whole_mask(call: Call, mask: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`mask`, [..., queries, keys] or what broadcasts to it, for this rank's heads and all positions.

    A mask over all positions is taken as it is; one over own keys for every query alike (padding), or over own queries
    and all keys, is gathered.

    Raises:
        LayoutError: it is over own queries and own keys.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    while mask.ndim < -POSITIONS:
        mask = mask.unsqueeze(0)
    queries, keys = call.query.shape[POSITIONS], call.key.shape[POSITIONS]
    own_queries = mask.shape[POSITIONS] == queries and queries > 1
    own_keys = mask.shape[KEYS] == keys and keys > 1
    if own_queries and own_keys:
        raise LayoutError(
            f"an attention mask of {list(mask.shape)} tells which of this process's own positions see each other, but "
            f"cp({size}) lets all positions of a sequence meet: use is_causal=True, or a mask over the whole sequence"
        )
    if own_keys:
        mask = gather_sum(mask, group, KEYS, size * keys)
    elif own_queries:
        mask = gather_sum(mask, group, POSITIONS, size * queries)
    if mask.ndim >= -HEADS and mask.shape[HEADS] > 1:
        heads = mask.shape[HEADS] // size
        mask = mask.narrow(HEADS, rank * heads, heads)
    return mask


def _repeat(part: torch.Tensor, size: int) -> torch.Tensor:
    """Keys or values in as many heads as `size` ranks can share: each head several times, side by side."""
    heads = part.shape[HEADS]
    times = math.lcm(heads, size) // heads
    return part if times == 1 else part.repeat_interleave(times, HEADS)
