"""ModelProfile: what one sample costs in every block of a model, before anybody decides how to spread it.

Everything is per sample (a sequence, an image) and for the forward, unsharded: the planner multiplies by micro-batch,
divides by degrees, and adds backward, recomputation and communication.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, final

Kind = Literal["matmul", "attention", "conv", "embedding", "elementwise", "norm", "loss", "route", "scan"]
Cut = Literal["", "column", "row", "heads", "vocab", "sequence", "expert"]
"""How tensor parallelism cuts an operation: its output features (column), its input features (row), its heads, its
vocabulary, the positions of the sequence (norms, dropouts and residuals under sequence parallelism), whole experts
(ep), or not at all ("")."""


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or a group of kernels that run and are cut alike.

    Attributes:
        name: of the module that runs it, below its block: "attention.query".
        shape: of a matrix product (rows per sample, output features, input features); of attention (query positions,
            key positions, heads, key-value heads, head dim); () of what is bound by memory.
        flops: of one sample's forward; a product of m x k and k x n counts 2mnk.
        moved_bytes: read and written by one sample's forward, activations only.
        saved_bytes: activations that the backward needs and that no operation before has counted.
        peak_bytes: of a loss that was traced: the most that its forward and backward have at once, beside what was
            kept before it; 0 where nobody traced it.
        output_bytes: of one sample.
        parameters, parameter_bytes: read by it; parameters shared with an earlier operation count there alone.
        trained: whether its parameters get gradients; input_gradient: whether its input needs one.
        cut: see Cut.
        active: how much of `flops` and of the activations one sample really uses, for experts (top_k / experts of
            `parameters`); 1 elsewhere. `flops` and bytes are already those of the experts used.
        chosen: experts that a token goes to (top_k).
        in_windows: of attention where windows leave a query fewer keys than there are: of `flops`, which count those
            alone, the share that a fused kernel computes; 0 where a query sees all keys, or all before it.
        windowed: the share of the layers, of which this is the mean one, that have such a window.
        parts: of a product that stands for several, which follow one another: output features of each; () of one.
        gathered: whether every rank of tp has the whole of what it gives, though each computes a part (logits).
    """

    name: str
    kind: Kind
    flops: float = 0.0
    shape: tuple[int, ...] = ()
    moved_bytes: float = 0.0
    saved_bytes: float = 0.0
    output_bytes: float = 0.0
    parameters: int = 0
    parameter_bytes: float = 0.0
    trained: bool = True
    input_gradient: bool = True
    cut: Cut = ""
    active: float = 1.0
    chosen: int = 1
    parts: tuple[int, ...] = ()
    causal: bool = False
    gathered: bool = False
    peak_bytes: float = 0.0
    in_windows: float = 0.0
    windowed: float = 0.0

    @property
    def computed(self) -> float:
        """Of attention's FLOPs the share that a fused kernel computes: causal half is masked (2307.08691)."""
        return self.in_windows or (0.5 if self.causal else 1.0)


@final
@dataclass(frozen=True, slots=True)
class Block:
    """A unit of the model: what recompute and `fully_shard` treat as one, and between which a pipeline is cut.

    Attributes:
        name: of the module, "layers.*" for `count` equal ones in a row.
        input_bytes: activations that enter it, per sample (what recompute=full keeps, what a stage sends).
        repeated: whether it is one of the model's repeated blocks (else what stands before, between or after them).
        low_stream: whether what goes from block to block is counted in the precision's own width, as shapes have it;
            else as it was traced.
        low_share: of what goes into it, so much where FSDP gathers weights in 16 bits, as a trace with such weights has
            it: 0.5 of a stream that is float32 because embeddings are. Of a block that embeds, of what its tables give.
    """

    name: str
    operations: tuple[Operation, ...]
    count: int = 1
    input_bytes: float = 0.0
    repeated: bool = False
    low_stream: bool = False
    low_share: float = 1.0

    @property
    def has_experts(self) -> bool:
        """Whether a part of its tokens goes through each of several feed-forwards."""
        return any(operation.cut == "expert" for operation in self.operations)

    @property
    def parameters(self) -> int:
        """Of one of the `count`."""
        return sum(operation.parameters for operation in self.operations)

    @property
    def flops(self) -> float:
        """One sample's forward through one of the `count`."""
        return sum(operation.flops for operation in self.operations)

    @property
    def saved_bytes(self) -> float:
        """Activations of one sample kept for the backward of one of the `count`."""
        return sum(operation.saved_bytes for operation in self.operations)


@final
@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model as the planner sees it.

    Attributes:
        name: of the model or Task.
        blocks: in the order of the forward.
        precision: of the activations that the bytes count ("bfloat16", ...); parameter_bytes are of float32 parameters.
        tokens: positions of one sample that count as tokens (its targets); 1 for an image.
        seq: positions that cp cuts and sequence parallelism cuts; 0 where a sample has none.
        heads, kv_heads, experts, vocab: what tp and ep must divide; 0 where there is none.
        stateful: names of layers whose state depends on the batch (BatchNorm).
        tied: (name, name) of parameters that are one.
        tensor_parallel: whether a tensor parallel plan is known for it, context_parallel: whether cp can cut it.
        coupled: whether the loss couples samples.
        source: "traced", "measured", or the table or file that it was made from.
        digest: of everything above that matters, for caches.
    """

    name: str
    blocks: tuple[Block, ...]
    precision: str
    tokens: int = 1
    seq: int = 0
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    vocab: int = 0
    stateful: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    tensor_parallel: bool = False
    context_parallel: bool = False
    coupled: bool = False
    source: str = "traced"
    digest: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def has_windows(self) -> bool:
        """Whether queries see a window of the keys in some layers."""
        return any(operation.in_windows for block in self.blocks for operation in block.operations)

    @property
    def parameters(self) -> int:
        """All of them; tied ones once."""
        return sum(block.parameters * block.count for block in self.blocks)

    @property
    def trained_parameters(self) -> int:
        """Of them those that get gradients."""
        trained = ((o.parameters, block.count) for block in self.blocks for o in block.operations if o.trained)
        return sum(number * count for number, count in trained)

    @property
    def flops(self) -> float:
        """One sample's forward."""
        return math.fsum(block.flops * block.count for block in self.blocks)

    @property
    def num_repeated(self) -> int:
        """Repeated blocks: what a pipeline shares out."""
        return sum(block.count for block in self.blocks if block.repeated)
