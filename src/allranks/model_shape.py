"""ModelShape: a transformer by its sizes, and the ModelProfile that follows from them without torch."""

import math
from dataclasses import dataclass, field, fields
from typing import Final, Literal, final

from allranks.errors import ConfigError
from allranks.model_profile import Block, ModelProfile, Operation
from allranks.shape_operations import WIDTHS, Program, SampleOperations

PLAIN: Final = Program()
MOST: Final = 10**9
_MOST: Final = {"layers": 100_000}
"""Of every size: products of a few of them are still numbers that arithmetic takes."""


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
        windows: of the layers in turn, the positions that a query of ordinary attention sees, its own among them; 0: a
            layer sees all. All layers are counted alike, each as the mean of them. () is no windows.
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
    windows: tuple[int, ...] = ()
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name}={getattr(self, name)}, but it has to be at least 1")
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if type(value) is int and value < 0:
                raise ConfigError(f"{self.name}: {name}={value}, but it has to be at least 0")
            if type(value) is int and value > _MOST.get(name, MOST):
                raise ConfigError(f"{self.name}: {name} is larger than {_MOST.get(name, MOST):,}")
        if not self.head_dim and self.hidden % self.heads:
            near = math.gcd(self.hidden, self.heads)
            equation = f"hidden({self.hidden}) / heads({self.heads})"
            raise ConfigError(f"{self.name}: {equation} is no whole number; heads={near} fits, or say head_dim")
        if self.num_kv_heads < 1 or self.heads % self.num_kv_heads:
            raise ConfigError(f"{self.name}: kv_heads({self.num_kv_heads}) does not divide heads({self.heads})")
        if self.top_k and not self.experts:
            raise ConfigError(f"{self.name}: top_k={self.top_k}, but it has no experts to choose from: give experts")
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

    def profile(self, seq: int | None = None, precision: str = "bfloat16", program: Program = PLAIN) -> ModelProfile:
        """What one sample costs in every block.

        Args:
            seq: positions of a sample, instead of the shape's own.
            precision: of the activations ("float32", "bfloat16", ...).
            program: whose activations are counted.

        FLOPs as in Narayanan et al. 2104.04473, appendix; saved activations as in Korthikanti et al. 2205.05198,
        section 4, operation by operation, with attention that keeps no scores (FlashAttention 2205.14135): planning
        adds them where the framework keeps them.
        """
        length = seq or self.seq
        if length < 1:
            raise ConfigError(f"{self.name}: seq={seq}, but a sample has at least one position")
        writer = _Writer(self, self._operations(length, WIDTHS.get(precision, 2), program))
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
            digest=f"{self}|{length}|{precision}|{program}",
            facts={"top_k": float(self.top_k), "dropout": float(self.dropout)},
        )

    def _operations(self, seq: int, width: int, program: Program) -> SampleOperations:
        return SampleOperations(seq, self.hidden, width, self.bias, self.gated, self.dropout, program)


@final
@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the blocks of a shape with the operations of its samples."""

    shape: ModelShape
    made: SampleOperations

    def embedding(self) -> Block:
        shape = self.shape
        table = shape.vocab * shape.hidden
        learned = self.made.seq * shape.hidden if shape.positions == "learned" else 0
        moved = self.made.rows(shape.hidden) * (4 if shape.dropout else 2)
        saved = 8.0 * self.made.seq + (self.made.seq * shape.hidden if shape.dropout else 0)
        rows = Operation(
            "embedding",
            "embedding",
            0.0,
            (),
            moved,
            saved,
            self.made.rows(shape.hidden),
            table,
            4.0 * table,
            cut="vocab",
        )
        added = Operation("positions", "embedding", 0.0, (), 0.0, 0.0, 0.0, learned, 4.0 * learned)
        return Block("embedding", (rows, added) if learned else (rows,), 1, 8.0 * self.made.seq, low_stream=True)

    def layer(self, count: int, experts: bool) -> Block:
        shape = self.shape
        operations = [self.made.norm("norm1"), *(self._latent() if shape.kv_rank else self._attention())]
        operations += [self.made.residual("residual1"), self.made.norm("norm2")]
        operations += self._experts() if experts else self.made.feed_forward("mlp", shape.ffn)
        operations.append(self.made.residual("residual2"))
        name = "experts.*" if experts else "layers.*"
        return Block(name, tuple(operations), count, self.made.rows(shape.hidden), True, low_stream=True)

    def head(self) -> Block:
        shape = self.shape
        logits = self.made.matmul(
            "head", shape.vocab, shape.hidden, "vocab", saved=self.made.rows(shape.hidden), bias=False
        )
        if shape.tied:
            logits = Operation(
                logits.name, "matmul", logits.flops, logits.shape, logits.moved_bytes, logits.saved_bytes,
                logits.output_bytes, cut="vocab",
            )  # fmt: skip
        scores = float(self.made.seq) * shape.vocab
        # The logits in the lower type and in float32; torch's cross entropy keeps its log-softmax, in float32.
        loss = Operation(
            "loss",
            "loss",
            5.0 * scores,
            (),
            scores * (2 * self.made.width + 12),
            scores * 4,
            4.0 * self.made.seq,
            cut="vocab",
        )
        return Block("head", (self.made.norm("norm"), logits, loss), 1, self.made.rows(shape.hidden), low_stream=True)

    def _attention(self) -> list[Operation]:
        shape, dim = self.shape, self.shape.dim
        queries, keys = shape.heads * dim, shape.num_kv_heads * dim
        parts = queries, keys, keys
        made = self.made.matmul("attention.qkv", sum(parts), shape.hidden, "column", self.made.read_by(3), parts=parts)
        operations = [made]
        if shape.positions == "rotary":
            operations.append(self.made.rotary(queries + keys))
        operations.append(
            self.made.scores(
                shape.heads,
                shape.num_kv_heads,
                queries + 2 * keys,
                queries,
                (dim, dim),
                shape.causal,
                turned=shape.positions == "rotary",
                windows=[turn[layer % len(turn)] for layer in range(shape.layers)] if (turn := shape.windows) else (),
            )
        )
        operations.append(self.made.matmul("attention.out", shape.hidden, queries, "row"))
        return operations

    def _latent(self) -> list[Operation]:
        """Attention through low-rank queries, keys and values (DeepSeek-V2 2405.04434, equations 9 to 19)."""
        shape, dim = self.shape, self.shape.dim
        nope, value = dim - shape.rope_dim, shape.value_dim or dim
        hidden, queries = shape.hidden, shape.heads * dim
        saved = self.made.rows(hidden)
        operations = []
        if shape.query_rank:
            operations.append(self.made.matmul("attention.query_down", shape.query_rank, hidden, "", saved))
            rank = 2 * self.made.rows(shape.query_rank)
            operations.append(self.made.matmul("attention.query_up", queries, shape.query_rank, "column", rank))
        else:
            operations.append(self.made.matmul("attention.query", queries, hidden, "column", saved))
        down = shape.kv_rank + shape.rope_dim
        operations.append(self.made.matmul("attention.kv_down", down, hidden, "", 0.0))
        up, kept = shape.heads * (nope + value), 2 * self.made.rows(shape.kv_rank)
        operations.append(self.made.matmul("attention.kv_up", up, shape.kv_rank, "column", kept))
        operations.append(self.made.rotary(2 * queries))
        operations.append(
            self.made.scores(
                shape.heads,
                shape.num_kv_heads,
                2 * queries + shape.heads * value,
                shape.heads * value,
                (dim, value),
                shape.causal,
            )
        )
        operations.append(self.made.matmul("attention.out", hidden, shape.heads * value, "row"))
        return operations

    def _experts(self) -> list[Operation]:
        shape = self.shape
        width, times = shape.expert_ffn or shape.ffn, shape.top_k
        parts = (3 if shape.gated else 2) * shape.hidden * width
        seq, chances = self.made.seq, float(self.made.seq * shape.experts)
        router = Operation(
            "router", "route", 2.0 * chances * shape.hidden, (seq, shape.experts, shape.hidden),
            self.made.rows(shape.hidden) + 12.0 * chances, 8.0 * chances, 4.0 * chances, shape.experts * shape.hidden,
            4.0 * shape.experts * shape.hidden,
        )  # fmt: skip
        # Permuted on the way in and back: read and written each time; the permuted copy is what the experts keep.
        moved = self.made.rows(shape.hidden) * times * 4
        spread = Operation(
            "dispatch", "elementwise", 0.0, (), moved, 0.0, self.made.rows(shape.hidden) * times, cut="expert"
        )
        up = self.made.expert(
            "experts.up", width * (2 if shape.gated else 1), shape.hidden, self.made.rows(shape.hidden) * times,
            shape.experts, times,
        )  # fmt: skip
        down = self.made.expert(
            "experts.down", shape.hidden, width, self.made.rows(shape.hidden) * times, shape.experts, times
        )
        assert up.parameters + down.parameters == shape.experts * parts
        between = self.made.activation("experts", self.made.rows(width) * times, "expert")
        shared = self.made.feed_forward("shared", shape.shared_ffn) if shape.shared_ffn else []
        return [router, spread, up, between, down, *shared]
