"""Seconds of one operation on one rank: forward, gradient of its input, gradient of its weights."""

from dataclasses import dataclass
from typing import final

from allranks.model_profile import Operation
from allranks.planning.compute import GROUPED, Machine, attention_seconds, matmul_seconds, moving_seconds
from allranks.planning.mechanisms import TORCH_COPIES
from allranks.planning.setting import Setting

KERNELS = {"matmul": 2, "conv": 2, "attention": 2, "norm": 1, "elementwise": 2, "embedding": 2, "loss": 8, "route": 120}
"""Kernels that the host starts for one operation's forward, casts included; its backward starts twice as many. A router
counts, sorts, permutes, waits for its counts and sends (Megatron-Core's and torchtitan's token dispatchers)."""
UNFUSED_KERNELS = 8
RING_KERNELS, RING_BACKWARD_KERNELS = 10, 4
"""Of each pass of a ring after the first: an attention and the nine of `_merge`; an attention's backward and three sums
(parallel/ring.py)."""
ATTENTION_BACKWARD = 2.5
"""FlashAttention recomputes the scores: five products to the forward's two (2307.08691, section 3.1)."""
BACKWARD_SHARE = 0.8
"""What fused attention's backward reaches of its forward's rate (2307.08691 and 2407.08608, figures 5 and 6)."""
MOVED_BACKWARD = 2.0
LOW = ("float8", "float4")

# Unfused attention, bytes moved per score in 16 bits: products write and read it (4), the masked softmax reads and
# writes (4), dropout too with its mask (5). Kept: softmax, dropout's output and mask (2205.05198, equation 1).
SCORE_MOVED, SCORE_MOVED_DROPOUT = 8.0, 13.0
SCORE_KEPT, SCORE_KEPT_DROPOUT = 2.0, 5.0


@final
@dataclass(frozen=True, slots=True)
class Share:
    """By how much the axes divide an operation's work, its weights, and what it keeps."""

    work: float
    weights: float
    kept: float


@final
@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a forward, of the gradients of inputs, and of those of weights."""

    forward: float
    backward: float
    weight: float


def share_of(operation: Operation, setting: Setting) -> Share:
    """tp cuts matrices and heads (1909.08053), cp positions, ep experts; sequence parallelism the rest (2205.05198)."""
    tp, cp = setting.tp, setting.cp
    spread = tp if setting.sequence_parallel else 1
    if operation.cut in ("row", "heads"):
        return Share(tp * cp, tp, tp * cp)
    if operation.cut in ("column", "vocab"):
        # A matrix's input is whole on every rank, or its positions are shared and gathered again (2205.05198, 4.2.2);
        # what stands between the matrices is cut as they are.
        whole = operation.kind in ("matmul", "embedding")
        again = 1 if setting.mechanisms.keeps_gathered_inputs else spread
        return Share(tp * cp, tp, cp * (again if whole else tp))
    if operation.cut == "sequence":
        return Share(spread * cp, 1, cp * (tp if setting.cuts_positions else 1))
    if operation.cut == "expert":
        weights = setting.ep * setting.mechanisms.expert_tensor(setting.tp)
        shared = setting.token_shards * cp
        return Share(shared, weights, shared if setting.sequence_parallel or operation.kind != "matmul" else cp)
    return Share(cp, 1, cp * spread)


def is_product(operation: Operation) -> bool:
    """Whether it is a matrix product whose shape is known."""
    return operation.kind in ("matmul", "conv") and len(operation.shape) == 3


def in_low_precision(operation: Operation, setting: Setting) -> bool:
    """Whether a product's operands are float8 or float4: the blocks' linear layers, not the output layer, no router."""
    return setting.precision in LOW and operation.cut not in ("vocab", "") and setting.mechanisms.low_linear


def operation_times(operation: Operation, setting: Setting, machine: Machine, experts: int) -> Times:
    """Seconds of one operation on one rank, for one micro-step.

    The roofline (Williams et al. 2009): products by `matmul_seconds`, attention by its kernel, the rest by its bytes.
    """
    if operation.kind == "attention":
        return attention_times(operation, setting, machine)
    if is_product(operation):
        return _product_times(operation, setting, machine, experts)
    share, how = share_of(operation, setting), setting.mechanisms
    moved = operation.moved_bytes * setting.micro_batch / share.work
    if operation.kind in ("elementwise", "norm"):
        moved *= how.norm_passes if operation.kind == "norm" and how.norm_passes > 1 else how.fusion
    if operation.kind == "loss":  # a fused loss moves less as it holds less
        moved *= min(1.0, how.logits_copies / TORCH_COPIES)
    forward = moving_seconds(machine, moved, KERNELS.get(operation.kind, 1)) if moved else 0.0
    if operation.kind in ("scan", "conv", "route"):
        forward += operation.flops * setting.micro_batch / share.work / machine.rate(setting.precision)
    return Times(forward, forward * MOVED_BACKWARD, 0.0)


def _product_times(operation: Operation, setting: Setting, machine: Machine, experts: int) -> Times:
    """One product forward and two backward, cut as 1909.08053 cuts it; experts' as MegaBlocks' (2211.15841)."""
    how, cut = setting.mechanisms, operation.cut
    rows, out, into = (float(size) for size in operation.shape)
    rows *= setting.micro_batch / setting.cp
    groups = 1.0
    if cut in ("column", "vocab"):
        out /= setting.tp
    elif cut == "row":
        into /= setting.tp
    elif cut == "expert":
        groups = max(1.0, experts / setting.ep)
        rows = rows / setting.token_shards / groups
    elif how.sequence_parallel:
        rows /= setting.tp
    work = 1.0 / GROUPED if groups > 1 else 1.0
    low = in_low_precision(operation, setting)
    precision = "bfloat16" if setting.precision in LOW and not low else setting.precision
    forward = work * matmul_seconds(machine, rows, out, into, precision, groups)
    backward = work * matmul_seconds(machine, rows, into, out, precision, groups) if operation.input_gradient else 0.0
    weight = 0.0
    if operation.trained and not setting.frozen:
        weight = work * matmul_seconds(machine, out, into, rows, precision, groups, features=(out, into))
        weight += moving_seconds(machine, how.accumulate_bytes * groups * out * into, 0)
    if low:
        # Each operand is read in 16 bits and written in 8, once as it is and once transposed (Transformer Engine).
        forward += moving_seconds(machine, 4.0 * groups * rows * into)
        backward += moving_seconds(machine, 4.0 * groups * rows * out)
    return Times(forward, backward, weight)


def attention_times(operation: Operation, setting: Setting, machine: Machine) -> Times:
    """Fused attention by its rate (2307.08691), unfused by its products and the scores' traffic (2205.05198).

    Unfused attention makes all scores, and masks them.
    """
    cut, batch, how = setting.tp * setting.cp, setting.micro_batch, setting.mechanisms
    queries, keys, heads, _, dim = operation.shape if len(operation.shape) == 5 else (1, 1, 1, 1, 128)
    if how.fused_attention:
        flops, computed = _fused_flops(operation, setting)
        flops *= batch / cut
        here = keys / (setting.cp if setting.ring else 1)
        forward = attention_seconds(machine, flops, dim, computed, setting.precision, how.attention, here)
        return Times(forward, forward * ATTENTION_BACKWARD / BACKWARD_SHARE, 0.0)
    products = batch * heads / setting.tp
    one = matmul_seconds(machine, queries / setting.cp, keys, dim, setting.precision, products)
    two = matmul_seconds(machine, queries / setting.cp, dim, keys, setting.precision, products)
    moved = SCORE_MOVED_DROPOUT if how.attention_dropout else SCORE_MOVED
    softmax = moving_seconds(machine, num_scores(operation, setting) * (moved - 4.0), 3)
    return Times(one + two + softmax, 2 * (one + two) + softmax * 1.3, 0.0)


def _fused_flops(operation: Operation, setting: Setting) -> tuple[float, float]:
    """(FLOPs of one sample's forward, of them the share that a fused kernel computes): windows spare what lies outside.

    Not under cp: all that it spreads is scaled_dot_product_attention (parallel/context.py), to which a window is a
    mask, behind which torch's kernels compute every score (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash
    attention takes none). Both products of all pairs are 4 s^2 h (2104.04473, appendix).
    """
    if setting.cp == 1 or not operation.in_windows:
        return operation.flops, operation.computed
    queries, keys, heads, _, dim = operation.shape
    others = (1 - operation.windowed) * (0.5 if operation.causal else 1.0)
    return 4.0 * queries * keys * heads * dim, operation.windowed + others


def ring_passes(setting: Setting) -> int:
    """Of the engine's ring, after the first, which attends to a rank's own keys; 0 where there is no such ring."""
    return setting.cp - 1 if setting.ring and setting.mechanisms.ring_sum_bytes else 0


def merging_seconds(operation: Operation, setting: Setting, machine: Machine) -> tuple[float, float]:
    """What the engine's ring adds to attention, (forward, backward), beside what it sends.

    Bytes counted in parallel/ring.py, of the rank whose queries all see what comes: under a causal mask the last one,
    to which half of each part's keys is seen. `_merge` scales the wide sum (read and written), scales a part (read,
    written wide) and adds it (two read, one written); a backward adds gradients of queries, keys and values to wide
    sums (two read, one written). What there is one of for each query and head is left out.
    """
    passes = ring_passes(setting)
    if not passes or len(operation.shape) != 5:
        return 0.0, 0.0
    queries, keys, heads, kv_heads, dim = operation.shape
    low, wide = setting.width, max(setting.mechanisms.ring_sum_bytes, setting.width)
    each = passes * setting.micro_batch * dim / setting.cp
    asking = each * queries * heads / setting.tp
    asked = each * keys * 2 * max(1.0, kv_heads / setting.tp) * (0.5 if operation.causal else 1.0)
    forward = moving_seconds(machine, (6 * wide + low) * asking, RING_KERNELS * passes)
    backward = moving_seconds(machine, (2 * wide + low) * (asking + asked), RING_BACKWARD_KERNELS * passes)
    return forward, backward


def num_kernels(operation: Operation, setting: Setting) -> int:
    """That the host starts for an operation's forward."""
    unfused = operation.kind == "attention" and not setting.mechanisms.fused_attention
    return UNFUSED_KERNELS if unfused else KERNELS.get(operation.kind, 1)


def num_scores(operation: Operation, setting: Setting) -> float:
    """Of one rank and micro-step: query positions times key positions times heads.

    Arithmetic; tp cuts the heads (1909.08053, section 3), cp the positions.
    """
    queries, keys, heads = operation.shape[:3]
    return setting.micro_batch * heads * queries * float(keys) / (setting.tp * setting.cp)


def kept_score_bytes(operation: Operation, setting: Setting) -> float:
    """What unfused attention keeps of its scores for the backward (2205.05198, equation 1)."""
    each = SCORE_KEPT_DROPOUT if setting.mechanisms.attention_dropout else SCORE_KEPT
    return each * num_scores(operation, setting)
