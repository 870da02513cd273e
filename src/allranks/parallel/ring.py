"""Attention over a sequence of which each rank has two chunks, by passing keys and values around a ring.

Each rank attends with its own queries to the keys that come by, and merges what it finds; no rank ever has a whole
sequence. Of 2 * n chunks rank r has chunks r and 2 * n - 1 - r, so that under a causal mask every rank computes as
much: of what comes from a lower rank all its queries see the first half; of what comes from a higher one the second
half of its queries sees everything. Merging is in float32 at least, in float64 for float64.

Sources: ring attention (arXiv 2310.01889); the balanced chunks of Llama 3 (arXiv 2407.21783, section 3.3.2).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from allranks.errors import LayoutError
from allranks.parallel.attention_blocks import attend, attend_backward
from allranks.parallel.context_ops import HEADS, POSITIONS, Call

Place = tuple[slice, slice, bool]


def pass_around(call: Call, group: dist.ProcessGroup) -> torch.Tensor:
    """Attention of this rank's queries over the whole sequence: [..., heads, own positions, channels].

    Raises:
        LayoutError: with a mask or dropout, which it cannot honour; or over keys of another length, causally.
    """
    size = dist.get_world_size(group)
    if call.attn_mask is not None:
        raise LayoutError(
            f"ring attention over cp({size}) cannot honour an attention mask of {list(call.attn_mask.shape)}: use "
            "is_causal=True, or layout.context=ulysses"
        )
    if call.dropout_p:
        raise LayoutError(
            f"ring attention over cp({size}) cannot drop: set attention's dropout, {call.dropout_p:g}, to 0, or use "
            "layout.context=ulysses"
        )
    queries, keys = call.query.shape[POSITIONS], call.key.shape[POSITIONS]
    if call.is_causal and queries != keys:
        raise LayoutError(
            f"ring attention over cp({size}) cannot be causal from {queries} to {keys} positions: use "
            "layout.context=ulysses"
        )
    if call.query.ndim < -HEADS:
        raise LayoutError(f"attention over {list(call.query.shape)} has no heads, which cp({size}) needs: use cp=1")
    # What goes before the heads is the batch.
    query, key, value = (part.reshape(-1, *part.shape[HEADS:]) for part in (call.query, call.key, call.value))
    found: torch.Tensor = _Ring.apply(query, key, value, call.is_causal, call.scale, group)  # type: ignore[no-untyped-call]
    return found.view(*call.query.shape[:-1], call.value.shape[-1])


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        causal: bool,
        scale: float | None,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        coming = _Coming((key, value))
        ctx.group, ctx.causal, ctx.scale = group, causal, scale
        merged, log_sum = torch.empty(0), torch.empty(0)
        for step in range(size):
            keys, values = coming.take()
            coming = _pass_on((keys, values), group) if step < size - 1 else coming
            mine, theirs, diagonal = _place(rank, (rank - step) % size, query.shape[POSITIONS], causal)
            block, block_sum = attend(
                query[:, :, mine], keys[:, :, theirs], values[:, :, theirs], causal=diagonal, scale=scale
            )
            if step == 0:
                # Copies: recompute=selective keeps what a kernel has returned, and must not find it changed.
                merged, log_sum = block.to(block_sum.dtype, copy=True), block_sum.clone()
            else:
                _merge(merged[:, :, mine], log_sum[:, :, mine], block, block_sum)
        output = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, log_sum = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        gradient, coming = gradient.contiguous(), _Coming((key, value))
        of_query = torch.zeros_like(query, dtype=log_sum.dtype)
        # They travel with the keys whose gradients they are, one step behind, and end where these began.
        sums = _Coming([torch.zeros_like(part, dtype=log_sum.dtype) for part in (key, value)])
        for step in range(size):
            keys, values = coming.take()
            coming = _pass_on((keys, values), ctx.group) if step < size - 1 else coming
            mine, theirs, diagonal = _place(rank, (rank - step) % size, query.shape[POSITIONS], ctx.causal)
            queries = (part[:, :, mine] for part in (query, output, log_sum, gradient))
            own, own_output, own_sum, own_gradient = queries
            found = attend_backward(
                *(own_gradient, own, keys[:, :, theirs], values[:, :, theirs], own_output, own_sum),
                causal=diagonal,
                scale=ctx.scale,
            )
            of_query[:, :, mine] += found[0]
            of_key, of_value = sums.take()
            of_key[:, :, theirs] += found[1]
            of_value[:, :, theirs] += found[2]
            sums = _pass_on((of_key, of_value), ctx.group)
        of_key, of_value = sums.take()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None


def _place(rank: int, source: int, length: int, causal: bool) -> Place:
    """Which of its queries `rank` computes with which of the keys of `source`, and whether along the diagonal."""
    everything, half = slice(0, length), length // 2
    if not causal:
        return everything, slice(None), False
    if source == rank:
        return everything, everything, True
    return (everything, slice(0, half), False) if source < rank else (slice(half, length), everything, False)


def _merge(merged: torch.Tensor, log_sum: torch.Tensor, block: torch.Tensor, block_sum: torch.Tensor) -> None:
    """Add to `merged` and `log_sum`, in place, what was found over other keys."""
    total = torch.logaddexp(log_sum, block_sum)
    merged.mul_(torch.exp(log_sum - total).unsqueeze(-1))
    merged.add_(block * torch.exp(block_sum - total).unsqueeze(-1))
    log_sum.copy_(total)


class _Coming:
    """Tensors that are here, or on their way from the rank before."""

    def __init__(self, tensors: Sequence[torch.Tensor], works: Sequence[dist.Work] = (), sent: Any = None) -> None:
        self._tensors = list(tensors)
        self._works = works
        self._sent = sent  # what is on its way to the rank after must not be freed before it is there

    def take(self) -> list[torch.Tensor]:
        for work in self._works:
            work.wait()
        self._works, self._sent = (), None
        return self._tensors


def _pass_on(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> _Coming:
    """Begin to send `tensors`, contiguous, to the next rank, and to receive their like from the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    moves = [dist.P2POp(dist.isend, part, group=group, group_peer=(rank + 1) % size) for part in tensors]
    moves += [dist.P2POp(dist.irecv, part, group=group, group_peer=(rank - 1) % size) for part in received]
    return _Coming(received, dist.batch_isend_irecv(moves), tensors)
