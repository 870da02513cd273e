"""What no layout is below: device-seconds at the full rate of every product, and the limits which that rules out."""

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile, Operation
from allranks.planning.bills import HOUR
from allranks.planning.compute import Machine
from allranks.planning.constants import constants_of
from allranks.planning.operation_times import is_product
from allranks.planning.processor import is_processor
from allranks.planning.question import Question

CAUSAL = 2.0
"""Causal attention does half of its FLOPs, and in windows more of the fewer ones."""


def least_device_seconds(profile: ModelProfile, cluster: Cluster, precision: str) -> float:
    """Of one sample, forward and backward, on all of its devices together; 0.0 where nothing is certain.

    Products take as long as their FLOPs at the best rate that `matmul_seconds` knows (whole tiles, whole waves, no
    prologue), fused attention the same of `attention_seconds`; the rest, every message and every wait take nothing.
    Where the device was measured its tables are the rates, and nothing is said.
    """
    if is_processor(cluster.device) or cluster.device.measured:
        return 0.0
    machine = Machine(cluster.device, constants_of(cluster.device))
    rate = max(machine.rate(precision), machine.rate("bfloat16" if precision in ("float8", "float4") else precision))
    share = max(machine.constants.attention, machine.constants.flash2, machine.constants.flash2_long)
    attention = machine.peak("bfloat16" if precision in ("float8", "float4") else precision) * share * CAUSAL
    seconds = 0.0
    for block in profile.blocks:
        for operation in block.operations:
            if operation.kind == "attention":
                seconds += block.count * 2.0 * operation.flops / attention
            elif is_product(operation):
                rows, out, into = operation.shape
                seconds += block.count * _passes(operation) * 2.0 * rows * out * into / rate
    return seconds


def _passes(operation: Operation) -> int:
    """Forward, gradient of the input, gradient of the weights."""
    return 1 + operation.input_gradient + operation.trained


def least_over(question: Question) -> float:
    """By how much the best imaginable plan on the question's cluster is over its limits: above 1.0, none keeps them.

    Arithmetic: tokens times the least of a token on all devices, over the limit; of money at the price of an hour.
    """
    if question.tokens is None:
        return 0.0
    cluster, over = question.cluster, 0.0
    profiles = {precision: question.make_profile(question.seq, precision) for precision in question.precisions}
    each = min(
        least_device_seconds(profile, cluster, name) / max(1, profile.tokens) for name, profile in profiles.items()
    )
    if question.limit_seconds:
        over = question.tokens * each / cluster.num_devices / question.limit_seconds
    if question.limit_money and cluster.device_hour_price is not None:
        over = max(over, question.tokens * each / HOUR * cluster.device_hour_price / question.limit_money)
    return over
