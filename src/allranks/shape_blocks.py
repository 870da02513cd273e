"""ShapeBlocks: the blocks and operations of a transformer of a given shape, with what each keeps and moves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from allranks.model_profile import Block, Operation

if TYPE_CHECKING:
    from allranks.model_shape import ModelShape

WIDTHS = {"float64": 8, "float32": 4, "float8": 2, "float4": 2}
"""Bytes of one activation; float8 and float4 lower the operands of matrix products alone."""


@final
@dataclass(frozen=True, slots=True)
class ShapeBlocks:
    """Writes the operations of a shape for samples of `seq` positions, `width` bytes an activation."""

    shape: "ModelShape"
    seq: int
    width: int
    fused: bool

    def embedding(self) -> Block:
        shape = self.shape
        table = shape.vocab * shape.hidden
        learned = self.seq * shape.hidden if shape.positions == "learned" else 0
        moved = self._rows(shape.hidden) * (4 if shape.dropout else 2)
        saved = 8.0 * self.seq + (self.seq * shape.hidden if shape.dropout else 0)
        rows = Operation(
            "embedding", "embedding", 0.0, (), moved, saved, self._rows(shape.hidden), table, 4.0 * table, cut="vocab"
        )
        added = Operation("positions", "embedding", 0.0, (), 0.0, 0.0, 0.0, learned, 4.0 * learned)
        return Block("embedding", (rows, added) if learned else (rows,), 1, 8.0 * self.seq)

    def layer(self, count: int, experts: bool) -> Block:
        shape = self.shape
        operations = [self._norm("norm1"), *(self._latent() if shape.kv_rank else self._attention())]
        operations += [self._residual("residual1"), self._norm("norm2")]
        operations += self._experts() if experts else self._feed_forward("mlp", shape.ffn)
        operations.append(self._residual("residual2"))
        name = "experts.*" if experts else "layers.*"
        return Block(name, tuple(operations), count, self._rows(shape.hidden), repeated=True)

    def head(self) -> Block:
        shape = self.shape
        logits = self._matmul("head", shape.vocab, shape.hidden, "vocab", saved=self._rows(shape.hidden), bias=False)
        if shape.tied:
            logits = Operation(
                logits.name, "matmul", logits.flops, logits.shape, logits.moved_bytes, logits.saved_bytes,
                logits.output_bytes, cut="vocab",
            )  # fmt: skip
        scores = float(self.seq) * shape.vocab
        # The logits in the lower type and in float32; torch's cross entropy keeps its softmax beside them.
        loss = Operation(
            "loss", "loss", 5.0 * scores, (), scores * (2 * self.width + 12), scores * 8, 4.0 * self.seq, cut="vocab"
        )
        return Block("head", (self._norm("norm"), logits, loss), 1, self._rows(shape.hidden))

    def _rows(self, features: float) -> float:
        return float(self.width) * self.seq * features

    def _norm(self, name: str) -> Operation:
        hidden, size = self.shape.hidden, self.shape.hidden * (2 if self.shape.bias else 1)
        moved = self._rows(hidden) * 2
        return Operation(
            name, "norm", 5.0 * self.seq * hidden, (), moved, self._rows(hidden), self._rows(hidden), size, 4.0 * size,
            cut="sequence",
        )  # fmt: skip

    def _residual(self, name: str) -> Operation:
        hidden = self.shape.hidden
        moved, saved = self._rows(hidden) * 3, 0.0
        if self.shape.dropout:
            saved = float(self.seq * hidden)  # the mask, one byte each
            moved += saved if self.fused else saved + self._rows(hidden) * 2
        return Operation(name, "elementwise", 0.0, (), moved, saved, self._rows(hidden), cut="sequence")

    def _matmul(
        self, name: str, out: int, into: int, cut: Literal["", "column", "row", "vocab"], saved: float = 0.0,
        bias: bool | None = None,
    ) -> Operation:  # fmt: skip
        bias = self.shape.bias if bias is None else bias
        size = out * into + (out if bias else 0)
        flops = 2.0 * self.seq * out * into
        moved = self._rows(out + into)
        return Operation(
            name, "matmul", flops, (self.seq, out, into), moved, saved, self._rows(out), size, 4.0 * size, cut=cut
        )

    def _attention(self) -> list[Operation]:
        shape, dim = self.shape, self.shape.dim
        queries, keys = shape.heads * dim, shape.num_kv_heads * dim
        made = self._matmul("attention.qkv", queries + 2 * keys, shape.hidden, "column", self._rows(shape.hidden))
        operations = [made]
        if shape.positions == "rotary":
            moved = self._rows(queries + keys) * (2 if self.fused else 5)
            operations.append(Operation("attention.rotary", "elementwise", 0.0, (), moved, 0.0, 0.0, cut="heads"))
        operations.append(self._scores(queries + keys + keys, queries, dim, dim))
        operations.append(self._matmul("attention.out", shape.hidden, queries, "row"))
        return operations

    def _scores(self, read: int, output: int, dim: int, value_dim: int) -> Operation:
        shape = self.shape
        flops = 2.0 * self.seq * self.seq * shape.heads * (dim + value_dim)
        kept = self._rows(read + output) + 4.0 * self.seq * shape.heads
        return Operation(
            "attention.scores", "attention", flops, (self.seq, self.seq, shape.heads, shape.num_kv_heads, dim),
            self._rows(read + output), kept, self._rows(output), cut="heads", causal=shape.causal,
        )  # fmt: skip

    def _latent(self) -> list[Operation]:
        """Attention through low-rank queries, keys and values (DeepSeek-V2 2405.04434, equations 9 to 19)."""
        shape, dim = self.shape, self.shape.dim
        nope, value = dim - shape.rope_dim, shape.value_dim or dim
        hidden, queries = shape.hidden, shape.heads * dim
        saved = self._rows(hidden)
        operations = []
        if shape.query_rank:
            operations.append(self._matmul("attention.query_down", shape.query_rank, hidden, "", saved))
            rank = 2 * self._rows(shape.query_rank)
            operations.append(self._matmul("attention.query_up", queries, shape.query_rank, "column", rank))
        else:
            operations.append(self._matmul("attention.query", queries, hidden, "column", saved))
        down = shape.kv_rank + shape.rope_dim
        operations.append(self._matmul("attention.kv_down", down, hidden, "", 0.0))
        up, kept = shape.heads * (nope + value), 2 * self._rows(shape.kv_rank)
        operations.append(self._matmul("attention.kv_up", up, shape.kv_rank, "column", kept))
        moved = self._rows(2 * queries) * (2 if self.fused else 5)
        operations.append(Operation("attention.rotary", "elementwise", 0.0, (), moved, 0.0, 0.0, cut="heads"))
        operations.append(self._scores(2 * queries + shape.heads * value, shape.heads * value, dim, value))
        operations.append(self._matmul("attention.out", hidden, shape.heads * value, "row"))
        return operations

    def _feed_forward(self, name: str, ffn: int) -> list[Operation]:
        shape = self.shape
        up = self._matmul(
            f"{name}.up", ffn * (2 if shape.gated else 1), shape.hidden, "column", self._rows(shape.hidden)
        )
        return [
            up,
            self._activation(name, self._rows(ffn), "column"),
            self._matmul(f"{name}.down", shape.hidden, ffn, "row"),
        ]

    def _activation(self, name: str, one: float, cut: Literal["column", "expert"]) -> Operation:
        """Between the matrices: gelu keeps its input and its output, silu(gate) * up keeps four tensors, fused three."""
        kept = (3 if self.fused else 4) if self.shape.gated else 2
        moved = (3 if self.fused else 5) if self.shape.gated else 2
        return Operation(f"{name}.activation", "elementwise", 0.0, (), one * moved, one * kept, one, cut=cut)

    def _experts(self) -> list[Operation]:
        shape = self.shape
        width, times = shape.expert_ffn or shape.ffn, shape.top_k
        parts = (3 if shape.gated else 2) * shape.hidden * width
        router = Operation(
            "router", "route", 2.0 * self.seq * shape.experts * shape.hidden, (self.seq, shape.experts, shape.hidden),
            self._rows(shape.hidden) + 12.0 * self.seq * shape.experts, 8.0 * self.seq * shape.experts,
            4.0 * self.seq * shape.experts, shape.experts * shape.hidden, 4.0 * shape.experts * shape.hidden,
        )  # fmt: skip
        # Permuted on the way in and back: read and written each time; the permuted copy is what the experts keep.
        moved = self._rows(shape.hidden) * times * 4
        spread = Operation(
            "dispatch", "elementwise", 0.0, (), moved, 0.0, self._rows(shape.hidden) * times, cut="expert"
        )
        up = self._expert(
            "experts.up", width * (2 if shape.gated else 1), shape.hidden, self._rows(shape.hidden) * times
        )
        down = self._expert("experts.down", shape.hidden, width, self._rows(shape.hidden) * times)
        assert up.parameters + down.parameters == shape.experts * parts
        between = self._activation("experts", self._rows(width) * times, "expert")
        shared = self._feed_forward("shared", shape.shared_ffn) if shape.shared_ffn else []
        return [router, spread, up, between, down, *shared]

    def _expert(self, name: str, out: int, into: int, saved: float) -> Operation:
        shape = self.shape
        rows, size = self.seq * shape.top_k, shape.experts * out * into
        return Operation(
            name, "matmul", 2.0 * rows * out * into, (rows, out, into), self.width * float(rows) * (out + into), saved,
            self.width * float(rows) * out, size, 4.0 * size, cut="expert", active=shape.top_k / shape.experts,
            chosen=shape.top_k,
        )  # fmt: skip
