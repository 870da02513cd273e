"""Bytes on one rank at the step's peak, by category."""

from collections.abc import Sequence

from allranks.model_profile import ModelProfile
from allranks.plan import MemoryUse
from allranks.planning.block_cost import BlockCost
from allranks.planning.pipeline import under_way
from allranks.planning.setting import Setting


def memory_use(
    profile: ModelProfile, setting: Setting, costs: Sequence[BlockCost], held: Sequence[int], stage: int
) -> MemoryUse:
    """What the rank of a pipeline stage holds that has `held` blocks of each kind.

    Weights, gradients and optimizer: ZeRO 1910.02054, section 5, with the stage's bytes per parameter in `mechanisms`.
    Activations: 2205.05198, section 4, from the profile's saved bytes. Gathered blocks: FSDP keeps two whole (2304.11277,
    section 3.4).
    """
    how = setting.mechanisms
    dense = sum(count * cost.parameters for cost, count in zip(costs, held, strict=True))
    expert = sum(count * cost.expert_parameters for cost, count in zip(costs, held, strict=True))
    shard = max(1, setting.shard)
    expert_shard = max(1.0, shard / setting.ep) if setting.ep > 1 else float(shard)
    shared = dense / shard + expert / expert_shard
    whole = dense + expert
    trained = 0.0 if setting.frozen else 1.0
    weights = (shared if setting.zero >= 3 else whole) * how.weight_bytes
    gradients = (shared if setting.zero >= 2 else whole) * how.gradient_bytes * trained
    optimizer = (shared if setting.zero >= 1 else whole) * how.optimizer_bytes * trained
    if setting.offload in ("parameters", "all"):
        weights = optimizer = 0.0
    times = under_way(setting.schedule, stage, setting.pp, setting.chunks, setting.micro_steps)
    kept = sum(count * cost.kept_bytes for cost, count in zip(costs, held, strict=True)) * times
    if setting.offload in ("activations", "all"):
        kept = 0.0
    working = max((cost.working_bytes for cost, count in zip(costs, held, strict=True) if count), default=0.0)
    logits = max((cost.logits_bytes for cost, count in zip(costs, held, strict=True) if count), default=0.0)
    gathered = 0.0
    if setting.zero >= 3:
        largest = max(
            (c.parameters + c.expert_parameters for c, count in zip(costs, held, strict=True) if count), default=0
        )
        gathered = 2 * largest * how.gather_bytes + largest * how.reduce_bytes
    elif setting.zero >= 1 or how.gather_bytes < how.weight_bytes:
        gathered = whole * how.cast_bytes
    total = MemoryUse(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=kept + working,
        logits=logits,
        gathered=gathered,
        framework=how.context_bytes,
    )
    slack = how.slack * (total.total - how.context_bytes)
    return MemoryUse(
        weights=total.weights, gradients=total.gradients, optimizer=total.optimizer, activations=total.activations,
        logits=total.logits, gathered=total.gathered, communication=0.0, framework=total.framework + slack,
    )  # fmt: skip
