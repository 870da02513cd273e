"""What tp, cp and ep send for one block, one micro-step and one rank: seconds before any overlap, and bytes."""

import math
from dataclasses import dataclass, replace
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
from allranks.planning.mechanisms import Mechanisms
from allranks.planning.operation_times import attention_times, is_product
from allranks.planning.processor import is_processor
from allranks.planning.processor_tensor import tensor_seconds
from allranks.planning.repeats import ending
from allranks.planning.setting import Setting


@final
@dataclass(frozen=True, slots=True)
class Axes:
    """The groups of a Setting on a Cluster, and the machine they join.

    Attributes:
        shard: those who share a copy's parameters; copies: those who hold the same part of each copy (HSDP).
        twins: those who hold the same experts, where ep cuts them: of one copy, where they share them; twin_copies:
            those who hold the same part of them then.
    """

    machine: Machine
    tensor: Group
    context: Group
    expert: Group
    data: Group
    shard: Group
    copies: Group
    twins: Group
    twin_copies: Group
    pipeline: Group


def axes_of(cluster: Cluster, setting: Setting) -> Axes:
    """tp innermost, then cp, then data, pp outermost: the order of the mesh (and of Megatron-LM, 2104.04473)."""
    constants, world = constants_of(cluster.device), setting.world_size
    tp, cp, ep, inner = setting.tp, setting.cp, setting.ep, setting.tp * setting.cp
    data, shard = setting.dp * cp, max(1, setting.shard)
    twins = int(setting.expert_shards) if setting.experts_apart else max(1, data // ep)
    # Those who hold the same experts: the ranks of a sequence, and of the data-parallel ones every ep-th.
    apart = max(1, twins // cp)

    def group(*steps: tuple[int, int]) -> Group:
        return group_of(cluster, constants, world, steps)

    return Axes(
        machine=Machine(cluster.device, constants),
        tensor=group((tp, 1)),
        context=group((cp, tp)),
        expert=group((ep, 1 if setting.mechanisms.experts_inside_tensor else inner)),
        data=group((data, tp)),
        # An optimizer's rows are not shared out among the ranks of a sequence (parallel/optimizer_shard.py).
        shard=group((shard, inner if setting.mechanisms.reduces_to_all else tp)),
        copies=group((max(1, data // shard), shard * tp)),
        twins=group((twins // apart, tp), (apart, ep * inner)),
        twin_copies=group((max(1, data // (ep * twins)), apart * ep * inner)),
        pipeline=group((setting.pp, inner * setting.dp)),
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

    def shown(self) -> "AxisTraffic":
        """The same where no attention hides it."""
        return replace(self, context=self.context + self.context_hidden, context_hidden=0.0)

    def __add__(self, other: "AxisTraffic") -> "AxisTraffic":
        """Of both."""
        return AxisTraffic(
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
            self.tensor_bytes + other.tensor_bytes,
            self.context_bytes + other.context_bytes,
            self.expert_bytes + other.expert_bytes,
            self.collectives + other.collectives,
            self.context_hidden + other.context_hidden,
        )


Both = tuple[AxisTraffic, AxisTraffic]
"""What forward and backward send, and what a repeated forward sends again."""


def axis_traffic(block: Block, setting: Setting, axes: Axes) -> Both:
    """Of one block; and of what its forward sends again where a backward recomputes it.

    tp: one all-reduce per row-cut product and direction (Shoeybi et al. 1909.08053), or a gather and a scatter of the
    same bytes (2205.05198). cp: keys and values go around the ring (2310.01889). ep: tokens to their experts and back
    (GShard 2006.16668), by all-to-all.
    """
    sent, again = AxisTraffic(), AxisTraffic()
    wider = setting.stream_widening(block)
    ends = ending(block)
    for operation in block.operations:
        found = _tensor_traffic(operation, setting, axes, wider, operation is ends) if setting.tp > 1 else None
        if setting.cp > 1 and operation.kind == "attention" and len(operation.shape) == 5:
            found = _context_traffic(operation, setting, axes)
        if found is not None:
            sent, again = sent + found[0], again + found[1]
    out, back = _expert_bytes(block, setting)
    if out and setting.ep > 1:
        share = _distinct_share(block, setting, axes.expert)
        seconds = sum(all_to_all_seconds(axes.expert, size, share) for size in (out, back))
        sent += AxisTraffic(expert=2 * seconds, expert_bytes=2 * (out + back), collectives=2)
        again += AxisTraffic(expert=seconds, expert_bytes=out + back)
    if out and setting.tp > 1 and setting.mechanisms.experts_see_all and setting.cuts_positions:
        # Their tokens are gathered; of the sum, which every rank has, each takes its part.
        entry = out / _choices(block)
        seconds = all_gather_seconds(axes.tensor, entry)
        sent += AxisTraffic(2 * seconds, 0, 0, 2 * entry, collectives=1)
        again += AxisTraffic(seconds, 0, 0, entry)
    if not setting.mechanisms.repeats_messages:
        again = AxisTraffic(sent.tensor / 2)
    return sent, again


def _tensor_traffic(operation: Operation, setting: Setting, axes: Axes, wider: float, ends: bool) -> Both | None:
    """What tp sends for one operation: Shoeybi et al. 1909.08053, section 3.

    Args:
        wider: how many times as wide the stream between blocks is as it was counted.
        ends: whether it is the block's last product, whose result no backward asks for: where a recomputed forward ends
            with the last tensor that one does, what such a product sends is not sent again.
    """
    group, how, device = axes.tensor, setting.mechanisms, axes.machine.device
    own = tensor_seconds(operation, setting, group, device) if is_processor(device) else None
    result = operation.output_bytes * setting.micro_batch / setting.cp
    if operation.cut == "row":
        # A product's result is summed in its own type; what enters the first one is gathered in that of the norm.
        entry = result * setting.widening
        summed, gathered = (_tensor_seconds(group, size, how) for size in (result, entry))
        if setting.cuts_positions:  # a gather before and a scatter behind, of half the seconds and bytes each
            before, behind = (gathered / 2, entry), (summed / 2, result)
        else:
            before, behind = (0.0, 0.0), (summed, 2 * result)
        if ends and how.recomputes_to_last_kept:
            behind = 0.0, 0.0
        seconds, size, again = summed + gathered, 2 * (result + entry), before[1] + behind[1]
        if own is not None:
            seconds = own * size / (4 * result)  # which was measured of results alone
            return AxisTraffic(seconds, 0, 0, size, collectives=1), AxisTraffic(seconds * again / size, 0, 0, again)
        return AxisTraffic(seconds, 0, 0, size, collectives=1), AxisTraffic(before[0] + behind[0], 0, 0, again)
    seconds = sent_bytes = 0.0
    number = 0
    if operation.cut == "vocab" and operation.kind in ("embedding", "matmul"):
        entry = operation.saved_bytes * setting.widening * setting.micro_batch / setting.cp
        size = result * wider if operation.kind == "embedding" else entry
        seconds, sent_bytes, number = _tensor_seconds(group, size, how), 2 * size, 1
    if operation.gathered:  # once: of the gradient, which every rank has, each takes its part
        seconds, sent_bytes, number = seconds + all_gather_seconds(group, result), sent_bytes + result, number + 1
    seconds = seconds if own is None else own
    # No block repeats these.
    return (AxisTraffic(seconds, 0, 0, sent_bytes, collectives=number), AxisTraffic()) if seconds else None


def _tensor_seconds(group: Group, num_bytes: float, how: Mechanisms) -> float:
    """An all-reduce (1909.08053, section 3), or a gather and a scatter of as many bytes (2205.05198, 4.2.2)."""
    if how.sequence_parallel:
        return 2 * all_gather_seconds(group, num_bytes)
    return all_reduce_seconds(group, num_bytes)


def _context_traffic(operation: Operation, setting: Setting, axes: Axes) -> Both:
    """What cp sends for attention: of Ulysses every second is waited for; of a ring what it does not hide behind its
    own attention: each pass brings a part while the last one is used.

    Ulysses (2309.14509): nothing is hidden. Ring attention (2310.01889): the exchange is hidden where computing a part
    takes longer than bringing the next one; on a processor nothing is.
    """
    if not setting.ring:
        swapped = _swapped_bytes(operation, setting)
        one_way = AxisTraffic(
            context=sum(swap_seconds(axes.context, size) for size in swapped), context_bytes=sum(swapped)
        )
        return one_way + one_way, one_way
    parts, sums = _ring_bytes(operation, setting)
    passed = (setting.cp - 1) / setting.cp  # a rank has its own part
    forward, summing = (all_gather_seconds(axes.context, size) for size in (parts, sums))
    backward, behind = forward + summing, (0.0, 0.0)
    if not is_processor(axes.machine.device):
        work = attention_times(operation, setting, axes.machine)
        behind = min(forward, work.forward), min(backward, work.backward)
    there = AxisTraffic(context=forward - behind[0], context_bytes=passed * parts, context_hidden=behind[0])
    back = AxisTraffic(context=backward - behind[1], context_bytes=passed * (parts + sums), context_hidden=behind[1])
    return there + back, there


def _ring_bytes(operation: Operation, setting: Setting) -> tuple[float, float]:
    """(Of a sequence's keys and values, of as many heads as a rank has; of the sums of their gradients, which go around
    behind them): 2310.01889; grouped queries: 2305.13245.
    """
    _, keys, _, kv_heads, dim = operation.shape
    numbers = 2.0 * keys * max(1.0, kv_heads / setting.tp) * dim * setting.micro_batch
    parts, least = setting.width * numbers, setting.mechanisms.ring_sum_bytes
    if not least:
        return parts, parts
    home = setting.cp / (setting.cp - 1)  # one pass more than the keys: they end where these began
    return parts, max(least, setting.width) * numbers * home


def _swapped_bytes(operation: Operation, setting: Setting) -> tuple[float, ...]:
    """Of a rank's queries, results, keys and values, which are swapped, positions for heads, in each direction.

    Key-value heads are repeated until the ranks can share them (parallel/context_ops.py; 2309.14509).
    """
    queries, keys, heads, kv_heads, dim = operation.shape
    one = setting.width * setting.micro_batch * dim / setting.cp
    shared = math.lcm(max(1, kv_heads // setting.tp), setting.cp)
    return (one * queries * heads / setting.tp,) * 2 + (one * keys * shared,) * 2


def _expert_bytes(block: Block, setting: Setting) -> tuple[float, float]:
    """Of the all-to-all to the experts and of the one back: each token goes to its top_k experts; forward and backward
    have both (2006.16668).
    """
    first = next((o for o in block.operations if o.cut == "expert" and is_product(o)), None)
    if first is None or setting.ep * setting.tp == 1:
        return 0.0, 0.0
    how = setting.mechanisms
    width = 1.0 if setting.precision == "float8" and how.low_dispatch else setting.width
    cut = setting.cp * (setting.token_shards if how.sequence_parallel else 1)
    size = float(first.shape[0]) * first.shape[2] * width * setting.micro_batch / cut
    return size * setting.widening, size


def _choices(block: Block) -> int:
    """Experts of a token, where the block says so."""
    return next((o.chosen for o in block.operations if o.cut == "expert" and o.chosen > 1), 1)


def _distinct_share(block: Block, setting: Setting, group: Group) -> float:
    """Nodes that a token's experts lie on, over the number of its experts; each is on any node with equal chance.

    What is left where a token goes to each node once (DeepSeek-V3 2412.19437, section 3.2.2); the mean over random
    experts is arithmetic.
    """
    chosen = _choices(block)
    if not setting.mechanisms.sends_once or not group.crosses or chosen == 1:
        return 1.0
    nodes = group.domains
    return nodes * (1 - (1 - 1 / nodes) ** chosen) / chosen
