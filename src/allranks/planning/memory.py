"""Bytes on one rank at the step's peak, by category."""

from collections.abc import Sequence

from allranks.model_profile import ModelProfile
from allranks.plan import MemoryUse
from allranks.planning.block_cost import BlockCost, Parameters
from allranks.planning.block_parts import add_up
from allranks.planning.host_parameters import waits_on_host
from allranks.planning.host_traffic import moves, staying_bytes
from allranks.planning.moments import Held, held_by, moments
from allranks.planning.pipeline import under_way
from allranks.planning.pipeline_traffic import received_bytes
from allranks.planning.setting import Setting


def memory_use(
    profile: ModelProfile, setting: Setting, costs: Sequence[BlockCost], held: Sequence[int], stage: int
) -> MemoryUse:
    """What the rank of a pipeline stage holds that has `held` blocks of each kind.

    Weights, gradients and optimizer: ZeRO 1910.02054, section 5, with the stage's bytes per parameter in `mechanisms`.
    Activations: 2205.05198, section 4, from the profile's saved bytes. Gathered: FSDP keeps two blocks whole
    (2304.11277, section 3.4). The peak is where the loss has its logits, or where the backward of the largest
    block works; where gradients are made in each step, the fullest of its moments (`moments`).
    """
    how = setting.mechanisms
    here = [(count, cost) for cost, count in zip(costs, held, strict=True) if count]
    weights, gradients, optimizer = _state_bytes(setting, here)
    times = under_way(setting.schedule, stage, setting.pp, setting.chunks, setting.micro_steps)
    kept = sum(count * cost.kept_bytes for count, cost in here) * times
    received = received_bytes(profile, setting, stage)
    if setting.pp > 1 and how.pipeline_outputs and not (received and setting.chunks > 1):
        kept += times * setting.chunks * max((cost.entry_bytes for _, cost in here), default=0.0)
    if moves(setting):
        kept = staying_bytes(profile, costs, held, times, how.offloaded_share)
    if received:  # what a stage begins with lies there, and is kept no second time
        begun = setting.chunks - (stage == 0)
        kept -= min(kept, times * begun / setting.chunks * max((cost.entry_bytes for _, cost in here), default=0.0))
    if how.gradients == "made":
        own = held_by(profile, setting, tuple(zip(held, costs, strict=True)), kept, gradients, times)
        # Schedules of several stages a rank keep what they have sent until their end (torch's PipelineScheduleMulti);
        # a rank sends as much as it receives.
        return _at_its_fullest(setting, own, weights, optimizer, received + (received if setting.chunks > 1 else 0.0))
    working = max((cost.working_bytes for _, cost in here), default=0.0)
    logits = max((cost.logits_bytes for _, cost in here), default=0.0)
    gathered = _gathered_bytes(setting, here)
    loose = kept + max(working, logits) + gathered
    # The update starts when the activations are gone.
    updating = max(0.0, _held(setting, add_up(here), 1, trained=True) * how.step_bytes - loose)
    return MemoryUse(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer + updating,
        activations=kept + (working if working > logits else 0.0),
        logits=logits if logits >= working else 0.0,
        gathered=gathered,
        communication=how.bucket_bytes if setting.dp > 1 else 0.0,
        framework=how.context_bytes,
    )


def _at_its_fullest(setting: Setting, held: Held, weights: float, optimizer: float, received: float) -> MemoryUse:
    fullest = max(moments(setting, held), key=lambda moment: moment.total)
    return MemoryUse(
        weights=weights,
        gradients=fullest.gradients,
        optimizer=optimizer,
        activations=fullest.activations,
        logits=fullest.logits,
        gathered=fullest.gathered,
        communication=fullest.communication + received,
        framework=setting.mechanisms.context_bytes,
    )


def slack_bytes(setting: Setting, use: MemoryUse, capacity_bytes: float) -> float:
    """What torch's caching allocator holds beyond what is in use; it gives it back where the device runs full.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
    """
    loose = setting.mechanisms.slack * (use.activations + use.logits + use.gathered)
    return min(loose, max(0.0, capacity_bytes - use.total))


def _held(setting: Setting, every: Parameters, stage: int, *, trained: bool) -> float:
    """How many of `every` a rank has something of that ZeRO's stage `stage` shares out (1910.02054, section 5)."""
    dense, expert = (every.trained, every.trained_expert) if trained else (every.dense, every.expert)
    if setting.zero < stage:
        return dense + expert
    return dense / max(1, setting.shard) + expert / setting.expert_shards


def _state_bytes(setting: Setting, here: Sequence[tuple[int, BlockCost]]) -> tuple[float, float, float]:
    """(Weights, gradients, optimizer) of the parameters that a rank keeps from step to step (1910.02054, section 3)."""
    how, every = setting.mechanisms, add_up(here)
    if waits_on_host(setting):  # but experts that are whole
        alone = setting.experts_whole
        every = Parameters(expert=every.expert, trained_expert=every.trained_expert) if alone else Parameters()
    return (
        _held(setting, every, 3, trained=False) * how.weight_bytes,
        _held(setting, every, 2, trained=True) * how.gradient_bytes,
        _held(setting, every, 1, trained=True) * how.optimizer_bytes,
    )


def _gathered_bytes(setting: Setting, here: Sequence[tuple[int, BlockCost]]) -> float:
    """Whole blocks beside their shards: gathered ones, and the gradients of one that are being reduced.

    FSDP (2304.11277, section 3): a unit computes while the next one is gathered, or the next few.
    """
    how = setting.mechanisms
    if setting.keeps_gathered:
        whole = sum(count * (cost.parameters + cost.expert_parameters) for count, cost in here)
        return whole * (how.gather_bytes + (0.0 if how.reduces_every_micro_step else how.reduce_bytes))
    if setting.zero >= 3:
        largest = max((cost.parameters + cost.expert_parameters for _, cost in here), default=0.0)
        together = min(1 + setting.prefetch, max(2, sum(count for count, _ in here)))
        return together * largest * how.gather_bytes + largest * how.reduce_bytes
    return sum(count * (cost.parameters + cost.expert_parameters) for count, cost in here) * how.cast_bytes
