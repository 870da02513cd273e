"""What tp, cp and ep send for one block, one micro-step and one rank: seconds before any overlap, and bytes."""

from dataclasses import dataclass
from typing import final

from allranks.cluster import Cluster
from allranks.model_profile import Block, Operation
from allranks.planning.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    group_of,
    swap_seconds,
)
from allranks.planning.compute import Machine
from allranks.planning.constants import constants_of
from allranks.planning.operation_times import attention_times, is_product
from allranks.planning.processor import is_processor
from allranks.planning.processor_tensor import tensor_seconds
from allranks.planning.setting import Mechanisms, Setting


@final
@dataclass(frozen=True, slots=True)
class Axes:
    """The groups of a Setting on a Cluster, and the machine they join.

    Attributes:
        shard: those who share a copy's parameters; copies: those who hold the same part of each copy (HSDP).
        twins: those who hold the same experts, where ep cuts them.
    """

    machine: Machine
    tensor: Group
    context: Group
    expert: Group
    data: Group
    shard: Group
    copies: Group
    twins: Group
    pipeline: Group


def axes_of(cluster: Cluster, setting: Setting) -> Axes:
    """tp innermost, then cp, then data, pp outermost: the order of the mesh (and of Megatron-LM, 2104.04473)."""
    constants = constants_of(cluster.device)
    inner, data, shard = setting.tp * setting.cp, setting.dp * setting.cp, max(1, setting.shard)

    def group(size: int, stride: int) -> Group:
        return group_of(cluster, constants, size, stride)

    return Axes(
        machine=Machine(cluster.device, constants),
        tensor=group(setting.tp, 1),
        context=group(setting.cp, setting.tp),
        expert=group(setting.ep, 1 if setting.mechanisms.experts_inside_tensor else inner),
        data=group(data, setting.tp),
        shard=group(shard, setting.tp),
        copies=group(max(1, data // shard), shard * setting.tp),
        twins=group(max(1, data // setting.ep), setting.ep * setting.tp),
        pipeline=group(setting.pp, inner * setting.dp),
    )


@final
@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """Seconds and bytes of forward and backward together; `collectives` of the forward.

    `context` are the seconds that are waited for, `context_hidden` those behind a ring's own attention.
    """

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0
    collectives: int = 0
    context_hidden: float = 0.0


def axis_traffic(block: Block, setting: Setting, axes: Axes) -> AxisTraffic:
    """Of one block.

    tp: one all-reduce per row-cut product and direction (Shoeybi et al. 1909.08053), or a gather and a scatter of the
    same bytes (2205.05198). cp: keys and values go around the ring (2310.01889). ep: tokens to their experts and back
    (GShard 2006.16668), by all-to-all.
    """
    tensor = tensor_bytes = context = context_bytes = hidden = 0.0
    collectives = 0
    for operation in block.operations:
        size, passes = _tensor_bytes(operation, setting)
        if setting.tp > 1 and is_processor(axes.machine.device):
            tensor += tensor_seconds(operation, setting, axes.tensor, axes.machine.device)
        elif size:
            tensor += passes * _tensor_seconds(axes.tensor, size, setting.mechanisms)
        if size:
            tensor_bytes += 2 * passes * size
            collectives += 1
        if operation.gathered and setting.tp > 1:  # once: of the gradient, which every rank has, each takes its part
            whole = operation.output_bytes * setting.micro_batch / setting.cp
            tensor_bytes += whole
            collectives += 1
            if not is_processor(axes.machine.device):
                tensor += all_gather_seconds(axes.tensor, whole)
        if setting.cp > 1 and operation.kind == "attention":
            size = _key_value_bytes(operation, setting)
            context_bytes += 3 * size if setting.ring else 2 * sum(_swapped_bytes(operation, setting))
            shown, behind = _context_seconds(operation, size, setting, axes)
            context, hidden = context + shown, hidden + behind
    expert_bytes = _expert_bytes(block, setting)
    expert = 4 * all_to_all_seconds(axes.expert, expert_bytes, _distinct_share(block, setting, axes.expert))
    collectives += 2 if expert_bytes else 0
    return AxisTraffic(tensor, context, expert, tensor_bytes, context_bytes, 4 * expert_bytes, collectives, hidden)


def _tensor_bytes(operation: Operation, setting: Setting) -> tuple[float, float]:
    """(Bytes that tp's ranks sum or gather for an operation, in how many directions): Shoeybi et al. 1909.08053,
    section 3.
    """
    batch = setting.micro_batch / setting.cp
    if setting.tp == 1:
        return 0.0, 0.0
    if operation.cut == "row":
        return operation.output_bytes * batch, 2.0
    if operation.cut == "vocab" and operation.kind == "embedding":
        return operation.output_bytes * batch, 1.0
    if operation.cut == "vocab" and operation.kind == "matmul":
        return operation.saved_bytes * batch, 1.0
    return 0.0, 0.0


def _tensor_seconds(group: Group, num_bytes: float, how: Mechanisms) -> float:
    """An all-reduce (1909.08053, section 3), or a gather and a scatter of as many bytes (2205.05198, 4.2.2)."""
    if how.sequence_parallel:
        return 2 * all_gather_seconds(group, num_bytes)
    return all_reduce_seconds(group, num_bytes)


def _key_value_bytes(operation: Operation, setting: Setting) -> float:
    """Of keys and values in 16 bits, of as many heads as a rank has (2310.01889; grouped queries: 2305.13245)."""
    if len(operation.shape) != 5:
        return 0.0
    _, keys, _, kv_heads, dim = operation.shape
    return 2.0 * 2.0 * keys * max(1.0, kv_heads / setting.tp) * dim * setting.micro_batch


def _context_seconds(operation: Operation, size: float, setting: Setting, axes: Axes) -> tuple[float, float]:
    """(Seconds that are waited for, seconds that are not): of Ulysses all its swaps are; of a ring what it does not
    hide behind its own attention: each pass brings a part while the last one is used.

    Ulysses (2309.14509): nothing is hidden. Ring attention (2310.01889): the exchange is hidden where computing a part
    takes longer than bringing the next one; on a processor nothing is.
    """
    if not setting.ring:
        return 2 * sum(swap_seconds(axes.context, swapped) for swapped in _swapped_bytes(operation, setting)), 0.0
    if is_processor(axes.machine.device) and len(operation.shape) == 5:
        _, keys, _, kv_heads, dim = operation.shape
        return 3 * all_gather_seconds(axes.context, 2 * _feature_bytes(setting) * dim * keys * kv_heads), 0.0
    seconds = all_gather_seconds(axes.context, size)
    work = attention_times(operation, setting, axes.machine)
    shown = max(0.0, seconds - work.forward) + max(0.0, 2 * seconds - work.backward)
    return shown, 3 * seconds - shown


def _swapped_bytes(operation: Operation, setting: Setting) -> tuple[float, ...]:
    """Of a rank's queries, results, keys and values, which are swapped, positions for heads, in each direction."""
    if len(operation.shape) != 5:
        return ()
    queries, keys, heads, kv_heads, dim = operation.shape
    one = _feature_bytes(setting) * dim / setting.cp
    return (one * queries * heads,) * 2 + (one * keys * kv_heads,) * 2


def _feature_bytes(setting: Setting) -> float:
    """Of one feature of one position of all samples, on one of tp's ranks: activations are as wide as the precision."""
    return {"float64": 8.0, "float32": 4.0}.get(setting.precision, 2.0) * setting.micro_batch / setting.tp


def _expert_bytes(block: Block, setting: Setting) -> float:
    """Of one all-to-all: each token goes to its top_k experts; forward and backward have two each (2006.16668)."""
    if setting.ep == 1:
        return 0.0
    first = next((o for o in block.operations if o.cut == "expert" and is_product(o)), None)
    if first is None:
        return 0.0
    how = setting.mechanisms
    width = 1.0 if setting.precision == "float8" and how.low_dispatch else 2.0
    cut = setting.cp * (setting.tp if how.sequence_parallel else 1)
    return float(first.shape[0]) * first.shape[2] * width * setting.micro_batch / cut


def _distinct_share(block: Block, setting: Setting, group: Group) -> float:
    """Nodes that a token's experts lie on, over the number of its experts; each is on any node with equal chance.

    What is left where a token goes to each node once (DeepSeek-V3 2412.19437, section 3.2.2); the mean over random
    experts is arithmetic.
    """
    chosen = next((o.chosen for o in block.operations if o.cut == "expert" and o.chosen > 1), 1)
    if not setting.mechanisms.sends_once or not group.crosses or chosen == 1:
        return 1.0
    nodes = group.size / group.near
    return nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen
