"""What one micro-step of one block costs on one rank: seconds by cause and bytes kept, after tp, cp and ep have cut it."""

from dataclasses import dataclass, replace
from typing import final

from allranks.cluster import Cluster
from allranks.model_profile import Block, Operation
from allranks.planning.collectives import Group, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, group_of
from allranks.planning.compute import Machine, attention_seconds, matmul_seconds, moving_seconds
from allranks.planning.constants import Constants, constants_of
from allranks.planning.setting import Mechanisms, Setting

KERNELS = {"matmul": 2, "conv": 2, "attention": 2, "norm": 1, "elementwise": 2, "embedding": 2, "loss": 8, "route": 10}
"""Kernels that the host starts for one operation's forward, casts included; its backward starts twice as many."""
UNFUSED_KERNELS = 8
ATTENTION_BACKWARD = 2.5
"""FlashAttention recomputes the scores: five products to the forward's two (2307.08691, section 3.1)."""
MOVED_BACKWARD = 2.0
COLLECTIVE_KERNELS = 4

# Unfused attention, bytes moved per score in 16 bits: products write and read it (4), the masked softmax reads and
# writes (4), dropout too with its mask (5). Kept for the backward: softmax, dropout's output and mask (2205.05198, eq. 1).
SCORE_MOVED, SCORE_MOVED_DROPOUT = 8.0, 13.0
SCORE_KEPT, SCORE_KEPT_DROPOUT = 2.0, 5.0


@final
@dataclass(frozen=True, slots=True)
class Axes:
    """The groups of a Setting on a Cluster, and the machine they join."""

    machine: Machine
    tensor: Group
    context: Group
    expert: Group
    data: Group
    shard: Group
    pipeline: Group


def axes_of(cluster: Cluster, setting: Setting) -> Axes:
    """tp innermost, then cp, then data, pp outermost: the order of the mesh (and of Megatron-LM, 2104.04473)."""
    constants = constants_of(cluster.device)
    inner = setting.tp * setting.cp

    def group(size: int, stride: int) -> Group:
        return group_of(cluster, constants, size, stride)

    return Axes(
        machine=Machine(cluster.device, constants),
        tensor=group(setting.tp, 1),
        context=group(setting.cp, setting.tp),
        expert=group(setting.ep, 1 if setting.mechanisms.experts_inside_tensor else inner),
        data=group(setting.dp * setting.cp, setting.tp),
        shard=group(max(1, setting.shard), setting.tp),
        pipeline=group(setting.pp, inner * setting.dp),
    )


@final
@dataclass(frozen=True, slots=True)
class BlockCost:
    """One block, one micro-step, one rank.

    Attributes:
        forward, backward, weight: device seconds of the forward, of the gradients of inputs, and of those of weights.
        again: what recompute repeats of the forward.
        tensor, context, expert: seconds of these axes' collectives in forward and backward, before any overlap;
            `tensor_again`: those that recompute repeats.
        kernels: that the host starts in a forward.
        kept_bytes: activations from its forward to its backward; working_bytes: more while its backward runs.
        logits_bytes: what stands beside them where it ends in a loss.
        parameters, expert_parameters: held whole by the rank before data-parallel sharding.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    again: float = 0.0
    tensor: float = 0.0
    tensor_again: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    kernels: float = 0.0
    collectives: float = 0.0
    kept_bytes: float = 0.0
    working_bytes: float = 0.0
    logits_bytes: float = 0.0
    entry_bytes: float = 0.0
    parameters: float = 0.0
    expert_parameters: float = 0.0
    trained: float = 1.0
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0


@final
@dataclass(frozen=True, slots=True)
class _Cut:
    """How an operation is divided: its work, its weights, what it keeps."""

    work: float
    weights: float
    kept: float


def _cut_of(operation: Operation, setting: Setting) -> _Cut:
    tp, cp = setting.tp, setting.cp
    spread = tp if setting.sequence_parallel else 1
    if operation.cut in ("row", "heads"):
        return _Cut(tp * cp, tp, tp * cp)
    if operation.cut in ("column", "vocab"):
        # A matrix's input is whole on every rank, or its positions are shared and gathered again (2205.05198, 4.2.2);
        # what stands between the matrices is cut as they are.
        whole = operation.kind in ("matmul", "embedding")
        return _Cut(tp * cp, tp, cp * (spread if whole else tp))
    if operation.cut == "sequence":
        return _Cut(spread * cp, 1, spread * cp)
    if operation.cut == "expert":
        weights = setting.ep * setting.mechanisms.expert_tensor(setting.tp)
        return _Cut(tp * cp, weights, tp * cp if setting.sequence_parallel or operation.kind != "matmul" else cp)
    return _Cut(cp, 1, cp * spread)


@final
@dataclass(frozen=True, slots=True)
class _Times:
    forward: float
    backward: float
    weight: float


def _times(operation: Operation, setting: Setting, machine: Machine, experts: int) -> _Times:
    """Seconds of one operation: forward, gradient of its input, gradient of its weights."""
    cut, batch, how = _cut_of(operation, setting), setting.micro_batch, setting.mechanisms
    if operation.kind == "attention":
        return _attention_times(operation, setting, machine)
    if operation.kind in ("matmul", "conv") and len(operation.shape) == 3:
        rows, out, into = (float(size) for size in operation.shape)
        rows *= batch / setting.cp
        low = setting.precision in ("float8", "float4") and operation.cut not in ("vocab", "") and how.low_linear
        precision = (
            setting.precision if low else "bfloat16" if setting.precision in ("float8", "float4") else setting.precision
        )
        groups = 1.0
        if operation.cut in ("column", "vocab"):
            out /= setting.tp
        elif operation.cut == "row":
            into /= setting.tp
        elif operation.cut == "expert":
            groups = max(1.0, experts / setting.ep)
            rows = rows / setting.tp / groups
        if setting.mechanisms.sequence_parallel and operation.cut == "":
            rows /= setting.tp
        forward = matmul_seconds(machine, rows, out, into, precision, groups)
        backward = matmul_seconds(machine, rows, into, out, precision, groups) if operation.input_gradient else 0.0
        weight = (
            matmul_seconds(machine, out, into, rows, precision, groups)
            if operation.trained and not setting.frozen
            else 0.0
        )
        if low:
            # Each operand is read in 16 bits and written in 8, once as it is and once transposed (Transformer Engine).
            cast = moving_seconds(machine, 4.0 * groups * rows * into)
            forward, backward = forward + cast, backward + moving_seconds(machine, 4.0 * groups * rows * out)
        return _Times(forward, backward, weight)
    moved = operation.moved_bytes * batch / cut.work
    if operation.kind in ("elementwise", "norm"):
        moved *= how.fusion
    forward = moving_seconds(machine, moved, KERNELS.get(operation.kind, 1)) if moved else 0.0
    if operation.kind in ("scan", "conv", "route"):
        forward += operation.flops * batch / cut.work / machine.rate(setting.precision)
    return _Times(forward, forward * MOVED_BACKWARD, 0.0)


def _attention_times(operation: Operation, setting: Setting, machine: Machine) -> _Times:
    cut, batch = setting.tp * setting.cp, setting.micro_batch
    queries, keys, heads, _, dim = operation.shape if len(operation.shape) == 5 else (1, 1, 1, 1, 128)
    flops = operation.flops * batch / cut
    if setting.mechanisms.fused_attention:
        forward = attention_seconds(machine, flops, dim, operation.causal, setting.precision)
        return _Times(forward, forward * ATTENTION_BACKWARD / 0.8, 0.0)
    products = batch * heads / setting.tp
    one = matmul_seconds(machine, queries / setting.cp, keys, dim, setting.precision, products)
    two = matmul_seconds(machine, queries / setting.cp, dim, keys, setting.precision, products)
    scores = batch * heads * queries * float(keys) / cut
    moved = SCORE_MOVED_DROPOUT if setting.mechanisms.attention_dropout else SCORE_MOVED
    softmax = moving_seconds(machine, scores * (moved - 4.0), 3)
    return _Times(one + two + softmax, 2 * (one + two) + softmax * 1.3, 0.0)


def block_cost(block: Block, setting: Setting, axes: Axes, experts: int) -> BlockCost:
    """Sum over the block's operations; what `setting` recomputes is repeated and not kept.

    2205.05198, section 5: full keeps each block's input alone; selective repeats attention's scores where they would
    be kept, and elsewhere all but the products (torch's selective activation checkpoint).
    """
    sums = {
        name: 0.0 for name in ("forward", "backward", "weight", "again", "kept", "kept_selective", "logits", "kernels")
    }
    dense = expert = trained = 0.0
    cheap = 0.0
    for operation in block.operations:
        times, cut = _times(operation, setting, axes.machine, experts), _cut_of(operation, setting)
        sums["forward"] += times.forward
        sums["backward"] += times.backward
        sums["weight"] += times.weight
        unfused = operation.kind == "attention" and not setting.mechanisms.fused_attention
        sums["kernels"] += UNFUSED_KERNELS if unfused else KERNELS.get(operation.kind, 1)
        kept = operation.saved_bytes * setting.micro_batch / cut.kept
        if operation.kind == "loss":
            sums["logits"] += kept * (0.5 if setting.mechanisms.fused_loss else 1.0)
            kept = 0.0
        sums["kept"] += kept
        if unfused:
            sums["kept"] += _score_bytes(operation, setting)
            cheap += times.forward
            sums["kept_selective"] += kept
        elif setting.mechanisms.fused_attention and operation.kind in ("norm", "elementwise"):
            cheap += times.forward
        else:
            sums["kept_selective"] += kept
        if operation.cut == "expert":
            expert += operation.parameters / cut.weights
        else:
            dense += operation.parameters / cut.weights
        trained += operation.parameters if operation.trained else 0
    entry = block.input_bytes * setting.micro_batch / setting.cp / (setting.tp if setting.sequence_parallel else 1)
    cost = BlockCost(
        forward=sums["forward"],
        backward=sums["backward"],
        weight=sums["weight"],
        kernels=sums["kernels"],
        logits_bytes=sums["logits"],
        entry_bytes=entry,
        parameters=dense,
        expert_parameters=expert,
        trained=trained / block.parameters if block.parameters else 1.0,
    )
    cost = _with_communication(cost, block, setting, axes)
    recompute = setting.recompute if block.repeated else "none"
    if recompute == "full":
        return replace(
            cost, again=cost.forward, tensor_again=cost.tensor / 2, kept_bytes=entry, working_bytes=sums["kept"]
        )
    if recompute == "selective":
        lost = sums["kept"] - sums["kept_selective"]
        return replace(cost, again=cheap, kept_bytes=sums["kept_selective"], working_bytes=lost)
    return replace(cost, kept_bytes=sums["kept"])


def _score_bytes(operation: Operation, setting: Setting) -> float:
    queries, keys, heads = operation.shape[:3]
    scores = setting.micro_batch * heads * queries * float(keys) / (setting.tp * setting.cp)
    return scores * (SCORE_KEPT_DROPOUT if setting.mechanisms.attention_dropout else SCORE_KEPT)


def _with_communication(cost: BlockCost, block: Block, setting: Setting, axes: Axes) -> BlockCost:
    """Seconds of tp's, cp's and ep's collectives, forward and backward.

    tp: one all-reduce per row-cut product and direction (Shoeybi et al. 1909.08053), or a gather and a scatter of the
    same bytes (2205.05198). cp: keys and values go around the ring (2310.01889). ep: tokens to their experts and back
    (GShard 2006.16668), by all-to-all.
    """
    batch = setting.micro_batch / setting.cp
    tensor = tensor_bytes = context = context_bytes = expert = expert_bytes = collectives = 0.0
    sent_experts = [o for o in block.operations if o.cut == "expert" and o.kind == "matmul" and len(o.shape) == 3]
    for operation in block.operations:
        meets = operation.cut == "row" or (operation.cut == "vocab" and operation.kind in ("embedding", "matmul"))
        if setting.tp > 1 and meets:
            size = (
                operation.output_bytes
                if operation.cut == "row" or operation.kind == "embedding"
                else operation.saved_bytes
            )
            twice = 2.0 if operation.cut == "row" else 1.0
            seconds = _tensor_seconds(axes.tensor, size * batch, setting.mechanisms)
            tensor, tensor_bytes = tensor + twice * seconds, tensor_bytes + 2 * twice * size * batch
            collectives += 1
        if setting.cp > 1 and operation.kind == "attention":
            size = _key_value_bytes(operation, setting)
            context_bytes += 3 * size
            context += _context_seconds(operation, size, setting, axes)
    if setting.ep > 1 and sent_experts:
        first = sent_experts[0]
        width = 1.0 if setting.precision == "float8" and setting.mechanisms.low_dispatch else 2.0
        rows = first.shape[0] * batch / (setting.tp if setting.mechanisms.sequence_parallel else 1)
        size = rows * first.shape[2] * width
        expert_bytes = 4 * size
        expert = 4 * all_to_all_seconds(axes.expert, size)
        collectives += 2
    return replace(
        cost, tensor=tensor, context=context, expert=expert, tensor_bytes=tensor_bytes, context_bytes=context_bytes,
        expert_bytes=expert_bytes, collectives=collectives,
    )  # fmt: skip


def _tensor_seconds(group: Group, num_bytes: float, how: Mechanisms) -> float:
    if how.sequence_parallel:
        return 2 * all_gather_seconds(group, num_bytes)
    return all_reduce_seconds(group, num_bytes)


def _key_value_bytes(operation: Operation, setting: Setting) -> float:
    _, keys, _, kv_heads, dim = operation.shape
    kv = max(1.0, kv_heads / setting.tp)
    return 2.0 * 2.0 * keys * kv * dim * setting.micro_batch


def _context_seconds(operation: Operation, size: float, setting: Setting, axes: Axes) -> float:
    """What a ring does not hide behind its own attention: each pass brings a part while the last one is used."""
    seconds = all_gather_seconds(axes.context, size)
    work = _attention_times(operation, setting, axes.machine)
    if not setting.ring:
        return 3 * seconds
    return max(0.0, seconds - work.forward) + max(0.0, 2 * seconds - work.backward)


__all__ = ["Axes", "BlockCost", "Constants", "axes_of", "block_cost"]
