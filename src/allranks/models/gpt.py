"""A decoder-only transformer as GPT-2 and GPT-3 are: learned positions, layer norms, biases and a plain feed-forward.

What stands around its blocks, and the conventions, are `transformer`'s; it needs nothing of allranks either.

Sources: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Brown et al., arXiv 2005.14165,
section 2.1; GELU (arXiv 1606.08415) by its tanh, as in their code.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from allranks.models.transformer import Decoder


class Attention(nn.Module):
    """Causal self-attention, positions being in its input: [batch, seq, hidden] -> the same."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        if hidden % num_heads:
            raise ValueError(f"hidden({hidden}) must be a multiple of num_heads({num_heads})")
        self.head_dim = hidden // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Attend from every position to itself and those before it."""
        # The number of heads is left open: tensor parallelism gives this rank some of them.
        query, key, content = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query(value), self.key(value), self.value(value))
        )
        mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return attended


class FeedForward(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same."""
        mixed: torch.Tensor = self.down(functional.gelu(self.up(value), approximate="tanh"))
        return mixed


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, hidden: int, num_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, num_heads), FeedForward(hidden, ffn)

    def forward(self, value: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, seq, hidden] -> the same. `positions` are known to the model's input only."""
        value = value + self.attention(self.attention_norm(value))
        mixed: torch.Tensor = value + self.feed_forward(self.feed_forward_norm(value))
        return mixed


class GPT(Decoder):
    """Tokens [batch, seq] (integers below `vocab_size`, seq at most `max_seq`) -> logits [batch, seq, vocab_size].

    Args:
        vocab_size, num_layers, hidden, num_heads: as `Transformer`'s.
        ffn: width of the feed-forward; by default 4 * hidden.
        max_seq: the longest sequence, and the rows of the table of positions.
        tied: whether the output layer is the embedding's own matrix.
        chunk: positions whose logits are held at once where forward is given `targets`; by default it takes none.
    """

    # How tensor parallelism cuts it, in the words of `allranks.Hints.tensor`.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embedding": "vocab",
        "position_embedding": "vocab",
        "layers.*.*_norm": "sequence",
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise",
        "layers.*.attention.out": "rowwise",
        "layers.*.feed_forward.up": "colwise",
        "layers.*.feed_forward.down": "rowwise",
        "norm": "sequence",
        "output": "vocab",
    }
    residual_ends = ("attention.out.weight", "feed_forward.down.weight")

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        hidden: int,
        num_heads: int,
        ffn: int | None = None,
        max_seq: int = 1024,
        tied: bool = True,
        chunk: int | None = None,
    ) -> None:
        blocks = (Block(hidden, num_heads, ffn if ffn is not None else 4 * hidden) for _ in range(num_layers))
        super().__init__(vocab_size, hidden, blocks, max_seq=max_seq, tied=tied, chunk=chunk, learned=True)
