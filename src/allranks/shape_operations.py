"""SampleOperations: the operations that transformers are made of, for samples of so many positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from allranks.attention_windows import keys_seen
from allranks.model_profile import Operation

WIDTHS = {"float64": 8, "float32": 4, "float8": 2, "float4": 2}
"""Bytes of one activation; float8 and float4 lower the operands of matrix products alone."""


@final
@dataclass(frozen=True, slots=True)
class Program:
    """What a program makes of a shape: two programs of one shape keep other activations for the backward.

    Attributes:
        fused: elementwise operations are fused into few kernels, which keep and move less.
        autocast: in a lower precision norms read and give float32 (CUDA's list in ATen/autocast_mode.h), and every
            product that reads one keeps a copy of its own in the lower type; else all of it flows in the lower type.
        copied_attention: attention's result lies head by head, as queries do that were turned head by head, and is
            copied position by position for the output product; both are kept.
    """

    fused: bool = False
    autocast: bool = False
    copied_attention: bool = False


OWN = Program(autocast=True, copied_attention=True)
"""That of `allranks.models`, spread by `parallelize`; a dry run sees it so."""


@final
@dataclass(frozen=True, slots=True)
class SampleOperations:
    """Operations on `seq` positions of `hidden` features.

    Attributes:
        width: bytes of an activation.
        bias, gated, dropout: as in ModelShape.
        program: what keeps them.
    """

    seq: int
    hidden: int
    width: int
    bias: bool
    gated: bool
    dropout: bool
    program: Program

    @property
    def fused(self) -> bool:
        """As the program does."""
        return self.program.fused

    @property
    def casts(self) -> bool:
        """Whether norms are wider than what products read."""
        return self.program.autocast and self.width < WIDTHS["float32"]

    def rows(self, features: float) -> float:
        """Bytes of `features` at every position."""
        return float(self.width) * self.seq * features

    def read_by(self, products: int) -> float:
        """Bytes of a norm's result that its products keep: one for all, or a copy for each that casts it."""
        return self.rows(self.hidden) * (products if self.casts else 1)

    def norm(self, name: str) -> Operation:
        """LayerNorm with a bias, RMSNorm without."""
        hidden, size = self.hidden, self.hidden * (2 if self.bias else 1)
        moved = self.rows(hidden) * 2
        saved = float(WIDTHS["float32"]) * self.seq * hidden if self.casts else self.rows(hidden)
        return Operation(
            name, "norm", 5.0 * self.seq * hidden, (), moved, saved, self.rows(hidden), size, 4.0 * size,
            cut="sequence",
        )  # fmt: skip

    def residual(self, name: str) -> Operation:
        """What is added to the residual stream, dropped out before where the shape says so."""
        hidden = self.hidden
        moved, saved = self.rows(hidden) * 3, 0.0
        if self.dropout:
            saved = float(self.seq * hidden)  # the mask, one byte each
            moved += saved if self.fused else saved + self.rows(hidden) * 2
        return Operation(name, "elementwise", 0.0, (), moved, saved, self.rows(hidden), cut="sequence")

    def matmul(
        self, name: str, out: int, into: int, cut: Literal["", "column", "row", "vocab"], saved: float = 0.0,
        bias: bool | None = None, parts: tuple[int, ...] = (),
    ) -> Operation:  # fmt: skip
        """A linear layer, or several `parts`; `saved` bytes of its input that no operation before has counted."""
        bias = self.bias if bias is None else bias
        size = out * into + (out if bias else 0)
        flops = 2.0 * self.seq * out * into
        moved = self.rows(out + into)
        return Operation(
            name, "matmul", flops, (self.seq, out, into), moved, saved, self.rows(out), size, 4.0 * size, cut=cut,
            parts=parts,
        )  # fmt: skip

    def activation(self, name: str, one: float, cut: Literal["column", "expert"]) -> Operation:
        """Between the matrices: gelu keeps input and output, silu(gate) * up keeps four tensors, three where fused."""
        kept = (3 if self.fused else 4) if self.gated else 2
        moved = (3 if self.fused else 5) if self.gated else 2
        return Operation(f"{name}.activation", "elementwise", 0.0, (), one * moved, one * kept, one, cut=cut)

    def scores(
        self, heads: int, kv_heads: int, read: int, output: int, dims: tuple[int, int], causal: bool,
        turned: bool = True, windows: Sequence[int] = (),
    ) -> Operation:  # fmt: skip
        """Attention over `read` features of queries, keys and values; `dims` of a head's keys and values.

        `turned`: queries are, by rotary positions. `windows`: of each layer, all of which are the mean one; as in
        `keys_seen`.
        """
        keys, share = keys_seen(self.seq, windows, causal) if windows else (float(self.seq), 0.0)
        flops = 2.0 * self.seq * keys * heads * sum(dims)
        copies = 2 if self.program.copied_attention and turned else 1
        kept = self.rows(read + copies * output) + 4.0 * self.seq * heads
        return Operation(
            "attention.scores", "attention", flops, (self.seq, self.seq, heads, kv_heads, dims[0]),
            self.rows(read + output), kept, self.rows(output), cut="heads", causal=causal,
            in_windows=share if keys < self.seq else 0.0,
            windowed=sum(0 < window < self.seq for window in windows) / max(1, len(windows)),
        )  # fmt: skip

    def rotary(self, features: int) -> Operation:
        """Queries and keys turned by their positions."""
        moved = self.rows(features) * (2 if self.fused else 5)
        return Operation("attention.rotary", "elementwise", 0.0, (), moved, 0.0, 0.0, cut="heads")

    def feed_forward(self, name: str, ffn: int) -> list[Operation]:
        """Two matrices and what stands between them, three where it is gated."""
        products = 2 if self.gated else 1
        parts = (ffn,) * products
        up = self.matmul(f"{name}.up", sum(parts), self.hidden, "column", self.read_by(products), parts=parts)
        down = self.matmul(f"{name}.down", self.hidden, ffn, "row")
        return [up, self.activation(name, self.rows(ffn), "column"), down]

    def expert(self, name: str, out: int, into: int, saved: float, experts: int, top_k: int) -> Operation:
        """One matrix of every expert, of which each position uses `top_k`."""
        rows, size = self.seq * top_k, experts * out * into
        return Operation(
            name, "matmul", 2.0 * rows * out * into, (rows, out, into), self.width * float(rows) * (out + into), saved,
            self.width * float(rows) * out, size, 4.0 * size, cut="expert", active=top_k / experts, chosen=top_k,
        )  # fmt: skip
