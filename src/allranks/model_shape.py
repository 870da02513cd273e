"""ModelShape: a transformer by its sizes, and the ModelProfile that follows from them without torch."""

import math
from dataclasses import dataclass, field
from typing import Literal, final

from allranks.errors import ConfigError
from allranks.model_profile import ModelProfile
from allranks.shape_blocks import WIDTHS, ShapeBlocks


@final
@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of equal blocks: GPT or Llama style, dense or with experts, full or latent attention.

    Attributes:
        layers, hidden, heads, kv_heads, ffn, vocab: as in a Hugging Face config.json.
        seq: positions of one sample where nobody names another.
        gated: three matrices in the feed-forward (SwiGLU) instead of two.
        head_dim: 0 is hidden / heads.
        positions: "learned" adds a table of `seq` rows, "rotary" turns queries and keys, "none" does neither.
        tied: whether the output layer is the embedding. bias: whether linear layers and norms have one.
        dropout: whether residuals and attention are dropped out.
        experts, top_k, expert_ffn: 0 is no experts; each is a feed-forward of `expert_ffn`.
        shared_ffn: width of the feed-forward that every token also passes, 0 for none.
        dense_layers: leading layers without experts. every: one layer in so many has experts.
        query_rank, kv_rank, query_dim, rope_dim, value_dim: latent attention (DeepSeek-V2 2405.04434, section 2.1);
            kv_rank 0 is ordinary attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    kv_heads: int = 0
    seq: int = 2048
    gated: bool = False
    head_dim: int = 0
    positions: Literal["learned", "rotary", "none"] = "learned"
    tied: bool = True
    bias: bool = True
    dropout: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    every: int = 1
    query_rank: int = 0
    kv_rank: int = 0
    query_dim: int = 0
    rope_dim: int = 0
    value_dim: int = 0
    causal: bool = True
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name}={getattr(self, name)}, but it has to be at least 1")
        if not self.head_dim and self.hidden % self.heads:
            near = math.gcd(self.hidden, self.heads)
            equation = f"hidden({self.hidden}) / heads({self.heads})"
            raise ConfigError(f"{self.name}: {equation} is no whole number; heads={near} fits, or say head_dim")
        if self.heads % self.num_kv_heads:
            raise ConfigError(f"{self.name}: kv_heads({self.num_kv_heads}) does not divide heads({self.heads})")
        if self.experts and not 0 < self.top_k <= self.experts:
            raise ConfigError(f"{self.name}: top_k={self.top_k} of experts={self.experts}: use 1 to {self.experts}")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads: as many as queries where nobody says otherwise."""
        return self.kv_heads or self.heads

    @property
    def dim(self) -> int:
        """Of one head's queries and keys."""
        return self.query_dim or self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """All of them; tied ones once."""
        return self.profile().parameters

    def profile(self, seq: int | None = None, precision: str = "bfloat16", fused: bool = False) -> ModelProfile:
        """What one sample costs in every block.

        Args:
            seq: positions of a sample, instead of the shape's own.
            precision: of the activations ("float32", "bfloat16", ...).
            fused: count the activations that fused kernels keep and move (Transformer Engine, Megatron-Core,
                torch.compile), not those of torch's eager operations.

        FLOPs as in Narayanan et al. 2104.04473, appendix; saved activations as in Korthikanti et al. 2205.05198,
        section 4, operation by operation, with attention that keeps no scores (FlashAttention 2205.14135): planning
        adds them where the framework keeps them.
        """
        length = seq or self.seq
        if length < 1:
            raise ConfigError(f"{self.name}: seq={seq}, but a sample has at least one position")
        writer = ShapeBlocks(self, length, WIDTHS.get(precision, 2), fused)
        sparse = 0
        if self.experts:
            sparse = sum(1 for layer in range(self.dense_layers, self.layers) if (layer + 1) % self.every == 0)
        blocks = [writer.embedding()]
        if dense := self.layers - sparse:
            blocks.append(writer.layer(dense, experts=False))
        if sparse:
            blocks.append(writer.layer(sparse, experts=True))
        blocks.append(writer.head())
        return ModelProfile(
            name=self.name,
            blocks=tuple(blocks),
            precision=precision,
            tokens=length,
            seq=length,
            heads=self.heads,
            kv_heads=self.num_kv_heads if not self.kv_rank else self.heads,
            experts=self.experts,
            vocab=self.vocab,
            tied=(("embedding.weight", "head.weight"),) if self.tied else (),
            tensor_parallel=True,
            context_parallel=True,
            source=self.source or "shape",
            digest=f"{self}|{length}|{precision}|{fused}",
            facts={"top_k": float(self.top_k), "dropout": float(self.dropout)},
        )
