"""Context parallelism by hand: DeepSpeed-Ulysses (arXiv 2309.14509) as one writes it into one's own attention."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from allranks.models.transformer import Attention, Decoder, rotate


class _Swap(Function):
    """[batch, heads, positions, channels] -> other heads for more positions, or back; the backward is the inverse."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, split: int, join: int) -> torch.Tensor:
        ctx.split, ctx.join = split, join
        sent = torch.stack(value.chunk(dist.get_world_size(), split)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Swap.apply(gradients[0], ctx.join, ctx.split), None, None  # type: ignore[no-untyped-call]


class UlyssesAttention(nn.Module):
    """The attention of a block over a sequence that all processes share: this one has some of its positions."""

    def __init__(self, whole: Attention) -> None:
        super().__init__()
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
        query, key, content = (_Swap.apply(part, 1, 2) for part in (query, key, content))  # type: ignore[no-untyped-call]
        mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        mixed = _Swap.apply(mixed, 2, 1)  # type: ignore[no-untyped-call]
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return attended


def share_positions(model: Decoder) -> None:
    """Let the model's blocks attend over what all processes have of a sequence."""
    blocks: list[Any] = list(model.layers)
    for block in blocks:
        block.attention = UlyssesAttention(block.attention)


def own_positions(batch: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """This process's part of the sequences of a batch, and where it stands in them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(batch["x"].shape[1], device=batch["x"].device).chunk(size)[rank]
    return {name: part[:, positions] for name, part in batch.items()}, positions
