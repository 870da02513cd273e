"""When a step of allranks' own engine is fullest: the moments at which different things lie in memory together.

torch makes gradients in the backward and drops them after the update, so that at the loss, where logits and activations
are whole, there may be none; FSDP2 keeps what stands outside of the blocks whole from its forward to the end of its
backward (torch/distributed/fsdp/_fully_shard). Dry runs say the same, moment by moment (bench/planned_memory.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

from allranks.model_profile import ModelProfile
from allranks.planning.block_cost import BlockCost
from allranks.planning.host_parameters import waits_on_host
from allranks.planning.setting import Setting


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes that come and go in a step, at one time of it; weights and optimizer state lie beside them."""

    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Of all of them."""
        return self.gradients + self.activations + self.logits + self.gathered + self.communication


@final
@dataclass(frozen=True, slots=True)
class Held:
    """What a rank of a stage holds.

    Attributes:
        whole: parameters before any sharding; around: those of no repeated block, head: of these the ones behind the
            blocks; block: of the largest repeated one; cast, cast_block: those that products read, which autocast
            copies. Experts that ep cuts are in none but `whole`, because nobody gathers them.
        gradient_bytes: of the state's gradients, as they rest between micro-steps.
        kept_bytes: of all micro-steps under way; one_kept_bytes: of one; first_kept_bytes: of one, before the second
            block; times: micro-steps under way.
        working_bytes: more in the backward of a repeated block; head_bytes: in that of what is behind them.
        logits_bytes: beside the activations where the loss is made.
    """

    whole: float
    around: float
    head: float
    block: float
    cast: float
    cast_block: float
    gradient_bytes: float
    kept_bytes: float
    one_kept_bytes: float
    first_kept_bytes: float
    times: float
    working_bytes: float
    head_bytes: float
    logits_bytes: float


def held_by(
    profile: ModelProfile,
    setting: Setting,
    here: Sequence[tuple[int, BlockCost]],
    kept_bytes: float,
    gradient_bytes: float,
    times: float,
) -> Held:
    """Of a stage with so many of each block of `profile`; the bytes as `Held` has them."""
    again = [place for place, block in enumerate(profile.blocks) if block.repeated]
    rows = [(place, count, cost) for place, (count, cost) in enumerate(here) if count]
    blocks = [cost for place, _, cost in rows if place in again]
    behind = [cost for place, _, cost in rows if again and place > again[-1]]
    before = [cost for place, _, cost in rows if not again or place < again[0]]
    alone = setting.ep > 1

    def gathered(cost: BlockCost) -> float:
        return cost.parameters + (0.0 if alone else cost.expert_parameters)

    return Held(
        whole=sum(count * (cost.parameters + cost.expert_parameters) for _, count, cost in rows),
        around=sum(count * gathered(cost) for place, count, cost in rows if place not in again),
        head=sum(gathered(cost) for cost in behind),
        block=max(map(gathered, blocks), default=0.0),
        cast=sum(count * cost.cast_parameters for _, count, cost in rows),
        cast_block=max((cost.cast_parameters for cost in blocks), default=0.0),
        gradient_bytes=gradient_bytes,
        kept_bytes=kept_bytes,
        one_kept_bytes=kept_bytes / times if times else 0.0,
        first_kept_bytes=sum(cost.kept_bytes for cost in before) + max((cost.kept_bytes for cost in blocks), default=0),
        times=times,
        working_bytes=max((cost.working_bytes for cost in blocks), default=0.0),
        head_bytes=max((cost.working_bytes for cost in (*behind, *before)), default=0.0),
        logits_bytes=max((cost.logits_bytes for _, _, cost in rows), default=0.0),
    )


def moments(setting: Setting, held: Held) -> Iterator[Moment]:
    """Those of a step that may be its fullest; of several micro-steps the last, whose gradients find others."""
    if setting.zero >= 3:
        yield from _of_shards(setting, held)
    else:
        yield from _of_copies(setting, held)


def _of_shards(setting: Setting, held: Held) -> Iterator[Moment]:
    """FSDP2: gradients are whole from their making to their reduction, in the type that was gathered."""
    how, shard = setting.mechanisms, max(1, setting.shard)
    gathers, reduces, others = how.gather_bytes, how.reduce_bytes, held.kept_bytes - held.one_kept_bytes
    summed = setting.micro_steps > 1
    rest = held.gradient_bytes if summed else 0.0
    whole = held.whole if setting.keeps_gathered else held.around
    waits = 2 * held.block * how.weight_bytes / shard if waits_on_host(setting) else 0.0
    loss = Moment(rest, held.kept_bytes, held.logits_bytes, whole * gathers + waits)
    yield loss
    yield replace(loss, gradients=rest + held.head * gathers, activations=held.kept_bytes + held.head_bytes, logits=0.0)
    coming = 0.0 if setting.keeps_gathered else 2 * held.block * gathers
    made = (held.head + held.block) * gathers
    yield Moment(rest + made, held.kept_bytes + held.working_bytes, 0.0, whole * gathers + coming + waits)
    yield Moment(
        gradients=max(rest, held.gradient_bytes * (1 - held.around / held.whole)) + made,
        activations=others + min(held.first_kept_bytes, held.one_kept_bytes) + held.working_bytes,
        gathered=(held.around + held.block) * gathers + waits,
        communication=held.block * reduces * (1 + 1 / shard),
    )
    reduced = held.around * reduces
    yield Moment(
        gradients=held.gradient_bytes + held.around * gathers,
        activations=others,
        communication=reduced * (1 + 1 / shard) if summed else reduced,
    )
    yield Moment(held.gradient_bytes)


def _of_copies(setting: Setting, held: Held) -> Iterator[Moment]:
    """Whole parameters, and autocast's copies of them, which its cache holds until a forward ends.

    DDP's buckets hold the gradients between steps, too. What the micro-steps before the last one sum lies beside them:
    torch copies it into the buckets when these are sent (torch/csrc/distributed/c10d/reducer.cpp).
    """
    how, others = setting.mechanisms, held.kept_bytes - held.one_kept_bytes
    summed = held.gradient_bytes if setting.micro_steps > 1 else 0.0
    buckets = held.gradient_bytes if setting.dp * setting.cp > 1 and setting.pp == 1 else 0.0
    kept_casts = 0.0 if setting.recompute == "full" else held.cast * how.cast_bytes
    earlier = (held.times - 1) * kept_casts
    loss = Moment(summed + buckets, held.kept_bytes, held.logits_bytes, earlier + held.cast * how.cast_bytes)
    yield loss
    casts = earlier + max(kept_casts, held.cast_block * how.cast_bytes)
    backward = max(held.working_bytes, held.head_bytes)
    yield replace(loss, activations=held.kept_bytes + backward, logits=0.0, gathered=casts)
    yield Moment(
        gradients=held.gradient_bytes,
        activations=others + min(held.first_kept_bytes, held.one_kept_bytes) + held.working_bytes,
        gathered=earlier + held.cast_block * how.cast_bytes,
    )
