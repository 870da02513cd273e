"""A decoder-only transformer over tokens or bytes: the reference model of the demo, the benchmarks and the tests.

Pre-norm blocks (RMSNorm), rotary positions, causal scaled-dot-product attention, a SwiGLU feed-forward; standard names
and nothing that needs allranks, so that it stands for any module that a user brings.

Sources: "Attention Is All You Need" (arXiv 1706.03762); RMSNorm (arXiv 1910.07467); rotary embedding (arXiv
2104.09864); SwiGLU (arXiv 2002.05202); initial values scaled by depth as in GPT-2.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from allranks.losses import ChunkedHead

ROTARY_BASE = 10_000.0
INIT_STD = 0.02  # GPT-2's


def rotary_angles(seq: int, head_dim: int, base: float = ROTARY_BASE) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of every position and pair of channels, each [seq, head_dim // 2], in float32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def rotate(value: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the channel pairs (i, i + head_dim/2) of `value` [..., seq, head_dim] by their positions' angles."""
    first, second = value.chunk(2, dim=-1)
    cos, sin = cos.to(value.dtype), sin.to(value.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions: [batch, seq, hidden] -> the same.

    Several query heads may share a key and value head (grouped queries, arXiv 2305.13245). A head has `head_dim`
    channels, by default hidden / num_heads.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, hidden: int, num_heads: int, num_kv_heads: int, max_seq: int, head_dim: int | None = None
    ) -> None:
        super().__init__()
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"head_dim({head_dim}) must be a multiple of 2: rotary turns pairs")
        if head_dim is None and hidden % (2 * num_heads):
            raise ValueError(f"hidden({hidden}) must be a multiple of 2 * num_heads({num_heads}): rotary turns pairs")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads({num_heads}) must be a multiple of num_kv_heads({num_kv_heads})")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden // num_heads if head_dim is None else head_dim
        self.query = nn.Linear(hidden, num_heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, num_kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(num_heads * self.head_dim, hidden, bias=False)
        cos, sin = rotary_angles(max_seq, self.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, value: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Attend from every position to itself and those before it; `positions` as in `Transformer`."""
        # The number of heads is left open: tensor parallelism gives this rank some of them.
        query, key, content = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query(value), self.key(value), self.value(value))
        )
        places = slice(query.shape[-2]) if positions is None else positions
        cos, sin = self.cos[places], self.sin[places]
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        shared = self.num_kv_heads < self.num_heads
        mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True, enable_gqa=shared)
        attended: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return attended


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> the same."""
        mixed: torch.Tensor = self.down(functional.silu(self.gate(value)) * self.up(value))
        return mixed


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, hidden: int, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = attention
        self.feed_forward_norm = nn.RMSNorm(hidden)
        self.feed_forward = feed_forward

    def forward(self, value: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """[batch, seq, hidden] -> the same."""
        value = value + self.attention(self.attention_norm(value), positions=positions)
        mixed: torch.Tensor = value + self.feed_forward(self.feed_forward_norm(value))
        return mixed


class Decoder(nn.Module):
    """What stands around the blocks of a decoder-only model: the embedding, a norm and the output layer.

    Args:
        learned: whether a table of `max_seq` positions is added to the embedding, and norms have biases: GPT-2's way.

    Attributes:
        residual_ends: how the names of those parameters end that add to the residual stream.
    """

    residual_ends: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        blocks: Iterable[nn.Module],
        *,
        max_seq: int,
        tied: bool,
        chunk: int | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__()
        self.max_seq = max_seq
        self.embedding = nn.Embedding(vocab_size, hidden)
        self.position_embedding = nn.Embedding(max_seq, hidden) if learned else None
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden) if learned else nn.RMSNorm(hidden)
        head = nn.Linear(hidden, vocab_size, bias=False)
        self.output = head if chunk is None else ChunkedHead(hidden, vocab_size, chunk=chunk)
        self._set_initial_values()
        if tied:
            self.output.weight = self.embedding.weight

    def _set_initial_values(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.ones_(parameter)  # norms
                continue
            # every block adds two terms to the residual stream: its variance shall not grow with depth
            ends_residual = name.endswith(self.residual_ends)
            nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * len(self.layers)) if ends_residual else INIT_STD)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the token that follows each position.

        Args:
            positions: int [seq], where the tokens stand in their sequence; not given: 0, 1, 2 ...
            targets: int [batch, seq], for a model that was made with `chunk`: then the losses of the positions come
                instead of logits, [batch, seq]; 0 where a target is -100.
        """
        if tokens.shape[-1] > self.max_seq:
            raise ValueError(f"a sequence of {tokens.shape[-1]} tokens, but max_seq is {self.max_seq}")
        value = self.embedding(tokens)
        if self.position_embedding is not None:
            places = torch.arange(tokens.shape[-1], device=tokens.device) if positions is None else positions
            value = value + self.position_embedding(places)
        for layer in self.layers:
            value = layer(value, positions=positions)
        normed = self.norm(value)
        found: torch.Tensor = self.output(normed) if targets is None else self.output(normed, targets)
        return found


class Transformer(Decoder):
    """Tokens [batch, seq] (integers below `vocab_size`, seq at most `max_seq`) -> logits [batch, seq, vocab_size].

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers: number of blocks.
        hidden: width of the residual stream; a multiple of 2 * num_heads where `head_dim` is not given.
        num_heads: attention heads of a block.
        ffn: width of the feed-forward; by default 8/3 of hidden, rounded up to a multiple of 16.
        max_seq: the longest sequence.
        tied: whether the output layer is the embedding's own matrix.
        num_kv_heads: heads of keys and values, a divisor of num_heads; by default as many.
        chunk: positions whose logits are held at once where forward is given `targets`; by default it takes none.
        head_dim: channels of a head, even; by default hidden / num_heads.
    """

    # How tensor parallelism cuts it, in the words of `allranks.Hints.tensor`.
    tensor_plan: ClassVar[Mapping[str, str]] = {
        "embedding": "vocab",
        "layers.*.*_norm": "sequence",
        "layers.*.attention.query": "colwise",
        "layers.*.attention.key": "colwise",
        "layers.*.attention.value": "colwise",
        "layers.*.attention.out": "rowwise",
        "layers.*.feed_forward.gate": "colwise",
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
        num_kv_heads: int | None = None,
        chunk: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        width = ffn if ffn is not None else -(-8 * hidden // 48) * 16
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        blocks = (
            Block(hidden, Attention(hidden, num_heads, kv_heads, max_seq, head_dim), FeedForward(hidden, width))
            for _ in range(num_layers)
        )
        super().__init__(vocab_size, hidden, blocks, max_seq=max_seq, tied=tied, chunk=chunk)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: torch.Tensor,
    num_tokens: int,
    *,
    max_seq: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Continue `prompt` [seq] by `num_tokens` sampled tokens: [seq + num_tokens].

    Each token sees at most the `max_seq` before it. `temperature` 0 takes the likeliest; `generator` (on the
    model's device) makes the draw repeatable. The model's training mode is restored.
    """
    training = model.training
    model.eval()
    tokens = prompt
    for _ in range(num_tokens):
        logits: Any = model(tokens[None, -max_seq:])[0, -1].float()
        if temperature == 0:
            following = logits.argmax(keepdim=True)
        else:
            following = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, following))
    model.train(training)
    return tokens
