"""Context parallelism by hand, written into one's own attention: DeepSpeed-Ulysses (2309.14509), and torch's own ring.

Ring attention (2310.01889) is `torch.distributed.tensor.experimental`'s, which has it for CUDA alone: here its loop is
given the processor's kernels. Positions are dealt so that all have as much to do under a causal mask.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from allranks.models.transformer import Attention, Decoder, rotate

aten = torch.ops.aten


class _Swap(Function):
    """[batch, heads, positions, channels] -> other heads for more positions, or back; the backward is the inverse."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, split: int, join: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        sent = torch.stack(value.chunk(dist.get_world_size(group), split)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back = _Swap.apply(gradients[0], ctx.join, ctx.split, ctx.group)  # type: ignore[no-untyped-call]
        return back, None, None, None


class _Ring(Function):
    """Causal attention over keys and values that go round; [batch, heads, positions, channels]."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group, ring = group, _torchs_ring()
        given: dict[str, Any] = {"query": query, "key": key, "value": value, "is_causal": True, "dropout_p": 0.0}
        found: tuple[torch.Tensor, ...] = ring._templated_ring_attention(group, 2, _attend, **given)
        ctx.save_for_backward(query, key, value, *found[:2])
        return found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        names = ("query", "key", "value", "out", "logsumexp")
        given: dict[str, Any] = dict(zip(names, ctx.saved_tensors, strict=True))
        given |= {"grad_out": gradients[0].contiguous(), "grad_out_name": "grad_out", "is_causal": True}
        found = _torchs_ring()._templated_ring_attention_backward(
            ctx.group, 2, _attend_backward, dropout_p=0.0, **given
        )
        return *found[:3], None


def _torchs_ring() -> Any:
    # Here, because it brings torch's compiler along, which Ulysses does not need.
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, **given)
    return found


def _attend_backward(**given: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(**given)


class SharedAttention(nn.Module):
    """The attention of a block over a sequence that a group shares: this process has some of its positions."""

    def __init__(self, whole: Attention, context: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._context, self._group = context, group
        self.query, self.key, self.value, self.out = whole.query, whole.key, whole.value, whole.out
        self.head_dim = whole.head_dim
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[batch, own positions, hidden] -> the same."""
        query, key, content = (
            layer(value).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        cos, sin = self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self._context == "ring":
            mixed = _Ring.apply(query, key, content, self._group)  # type: ignore[no-untyped-call]
        else:
            query, key, content = (_Swap.apply(part, 1, 2, self._group) for part in (query, key, content))  # type: ignore[no-untyped-call]
            mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True)
            mixed = _Swap.apply(mixed, 2, 1, self._group)  # type: ignore[no-untyped-call]
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return attended


def sequence_group(cp: int) -> dist.ProcessGroup:
    """The ranks, neighbours, that share this one's sequences; the data ranks are those of one place in their groups."""
    if cp == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    mine: dist.ProcessGroup
    mine, _ = dist.new_subgroups(cp)
    return mine


def share_positions(model: Decoder, context: str, group: dist.ProcessGroup) -> None:
    """Let the model's blocks attend over what the group has of a sequence, by "ulysses" or "ring"."""
    blocks: list[Any] = list(model.layers)
    for block in blocks:
        block.attention = SharedAttention(block.attention, context, group)


def own_positions(
    batch: dict[str, torch.Tensor], group: dist.ProcessGroup, *, dealt: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """This process's part of the sequences of a group's batch, and where it stands in them.

    Args:
        dealt: one chunk from the front and its counterpart from the back.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    whole = torch.arange(batch["x"].shape[1], device=batch["x"].device)
    chunks = whole.chunk(2 * size if dealt else size)
    positions = torch.cat((chunks[rank], chunks[2 * size - 1 - rank])) if dealt else chunks[rank]
    return {name: part[:, positions] for name, part in batch.items()}, positions
