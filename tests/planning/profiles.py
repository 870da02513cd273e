"""Models and clusters for tests of planning: small, with figures that can be checked by head."""

from typing import Any

from allranks.cluster import Cluster, Device, Link
from allranks.layout import Layout
from allranks.model_profile import Block, ModelProfile, Operation
from allranks.plan import Choice
from allranks.planning.axis_traffic import Axes
from allranks.planning.block_cost import BlockCost, block_cost, block_work
from allranks.planning.setting import Setting


def decoder(
    *,
    layers: int = 8,
    hidden: int = 64,
    heads: int = 8,
    kv_heads: int = 4,
    ffn: int = 128,
    vocab: int = 256,
    seq: int = 32,
    experts: int = 0,
    **changes: Any,
) -> ModelProfile:
    """A decoder-only Transformer, as `allranks.models.transformer.Transformer` is made of these sizes."""
    width = hidden // heads
    kv = kv_heads * width

    def matrix(name: str, out: int, into: int, cut: Any) -> Operation:
        size: dict[str, Any] = {"parameters": out * into, "parameter_bytes": 4.0 * out * into}
        moved = 2.0 * seq * (out + into)
        saved: dict[str, Any] = {"saved_bytes": 2.0 * seq * into, "moved_bytes": moved, "output_bytes": 2.0 * seq * out}
        return Operation(name, "matmul", 2.0 * seq * out * into, (seq, out, into), cut=cut, **size, **saved)

    attention = Operation(
        "attention.attend",
        "attention",
        4.0 * seq * seq * hidden,
        (seq, seq, heads, kv_heads, width),
        saved_bytes=2.0 * seq * (hidden + 2 * kv),
        cut="heads",
        causal=True,
    )
    inside = (
        matrix("attention.query", hidden, hidden, "column"),
        matrix("attention.key", kv, hidden, "column"),
        matrix("attention.value", kv, hidden, "column"),
        attention,
        matrix("attention.out", hidden, hidden, "row"),
        matrix("feed_forward.gate", ffn, hidden, "column"),
        matrix("feed_forward.up", ffn, hidden, "column"),
        matrix("feed_forward.down", hidden, ffn, "row"),
    )
    embedding = Operation("embedding", "embedding", parameters=vocab * hidden, parameter_bytes=4.0 * vocab * hidden)
    blocks = (
        Block("embedding", (embedding,)),
        Block("layers.*", inside, layers, input_bytes=2.0 * seq * hidden, repeated=True),
        Block("output", (matrix("output", vocab, hidden, "vocab"),), input_bytes=2.0 * seq * hidden),
    )
    about: dict[str, Any] = {"tokens": seq, "seq": seq, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    about |= {"experts": experts, "tensor_parallel": True, "context_parallel": True}
    return ModelProfile("decoder", blocks, "bfloat16", **{**about, **changes})


def cluster(nodes: int = 1, devices: int = 8, *, memory_bytes: float = 80e9, **changes: Any) -> Cluster:
    """Nodes of devices that multiply 100 TFLOP/s in bfloat16, with 100 GB/s inside a node and 10 GB/s between."""
    peaks = {"bfloat16": 100e12, "float16": 100e12, "float32": 10e12}
    device = Device("toy", "Toy", memory_bytes, 1e12, peaks)
    inside, between = Link("inside", 100e9, 1e-6), Link("between", 10e9, 1e-5)
    about: dict[str, Any] = {"device": device, "inside": inside, "between": between, "domain": devices}
    about |= {"host_memory_bytes": 2e12, "host_bandwidth": 20e9}
    return Cluster(f"{nodes}x{devices}:toy", nodes, devices, **{**about, **changes})


def choose(global_batch: int = 64, micro_batch: int = 1, **layout: Any) -> Choice:
    """A Choice whose layout has these degrees and modes."""
    made = Layout(**layout)
    return Choice(made, global_batch, micro_batch, chunks=made.num_stages // made.pp)


def cost_of(block: Block, setting: Setting, axes: Axes) -> BlockCost:
    """A block without experts, under a Setting."""
    return block_cost(block, setting, block_work(block, setting, axes, experts=0))
