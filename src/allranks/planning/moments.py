"""When a step of allranks' own engine is fullest: the moments at which different things lie in memory together.

torch makes gradients in the backward and drops them after the update, so that at the loss, where logits and activations
are whole, there may be none; FSDP2 keeps what stands outside of the blocks whole from its forward to the end of its
backward (torch/distributed/fsdp/_fully_shard). Dry runs say the same, moment by moment (bench/planned_memory.py).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

from allranks.model_profile import ModelProfile
from allranks.planning.block_cost import BlockCost
from allranks.planning.host_parameters import waits_on_host
from allranks.planning.pipeline import FORWARDS_FIRST
from allranks.planning.setting import Setting


@final
class Moment(NamedTuple):  # which is made faster than a dataclass: a search makes tens of thousands
    """Bytes that come and go in a step, at one time of it; weights and optimizer state lie beside them."""

    gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Of all of them: arithmetic, a sum."""
        return self.gradients + self.activations + self.logits + self.gathered + self.communication


@final
class Places(NamedTuple):
    """Parameters by where they stand: of no repeated block, of these the ones in front of the blocks, and behind them;
    of the largest block, and of its last product; all of them, before any sharding.

    Experts that ep cuts are in none of them, where they are whole: nobody gathers them.
    """

    around: float = 0.0
    before: float = 0.0
    head: float = 0.0
    block: float = 0.0
    last: float = 0.0
    whole: float = 0.0

    def with_block(self, count: float, number: float, last: float) -> "Places":
        """And `count` of a repeated block of `number`, the last product of which has `last`."""
        block, most, whole = max(self.block, number), max(self.last, last), self.whole + count * number
        return self._replace(block=block, last=most, whole=whole)

    def with_rest(self, count: float, number: float, *, before: bool, behind: bool) -> "Places":
        """And `count` of a block that does not repeat: arithmetic, a sum."""
        return self._replace(
            around=self.around + count * number,
            before=self.before + number * before,
            head=self.head + number * behind,
            whole=self.whole + count * number,
        )


@final
class Held(NamedTuple):
    """What a rank of a stage holds.

    Attributes:
        has: its parameters; makes: those of them that get gradients.
        casts, block_casts, casts_around: parameters that products read, which autocast copies: all, of the largest
            block, outside of the blocks.
        gradient_bytes: as they rest between micro-steps, without those of whole experts that ep cuts:
            expert_gradient_bytes.
        kept_bytes: of all micro-steps under way; one_kept_bytes: of one; first_kept_bytes: of one, up to the first
            block's end; times: micro-steps under way.
        apart: of the largest block the experts that are gathered by themselves, when the block before has given back
            its own; apart_made: those that get gradients.
        working_bytes: more in the backward of a repeated block; head_bytes: in that of what is behind them.
        logits_bytes: beside the activations where the loss is made; other_logits_bytes: of other micro-steps' losses,
            until their backwards.
    """

    has: Places
    makes: Places
    casts: float
    block_casts: float
    casts_around: float
    gradient_bytes: float
    expert_gradient_bytes: float
    kept_bytes: float
    one_kept_bytes: float
    first_kept_bytes: float
    times: float
    apart: float
    apart_made: float
    working_bytes: float
    head_bytes: float
    logits_bytes: float
    other_logits_bytes: float

    @property
    def gradients(self) -> float:
        """Bytes of all of them."""
        return self.gradient_bytes + self.expert_gradient_bytes


def held_by(
    profile: ModelProfile,
    setting: Setting,
    here: Sequence[tuple[int, BlockCost]],
    kept_bytes: float,
    gradient_bytes: float,
    times: float,
) -> Held:
    """Of a stage with so many of each block; `kept_bytes` and all `gradient_bytes` as `Held` has them. Arithmetic: sums
    and largest values, of blocks apart from what stands around, as FSDP2 does (torch/distributed/fsdp/_fully_shard)."""
    again = [place for place, block in enumerate(profile.blocks) if block.repeated]
    first, final = (again[0], again[-1]) if again else (len(here), len(here))
    has = makes = Places()
    casts = block_casts = casts_around = experts = 0.0
    apart = apart_made = first_kept = block_kept = working = head_working = logits = kept_logits = 0.0
    alone = setting.experts_whole
    # One pass: a search asks this of every stage of thousands of settings.
    for place, (count, cost) in enumerate(here):
        if not count:
            continue
        gathered = cost.parameters if alone else cost.parameters + cost.expert_parameters
        made = cost.trained if alone else cost.trained + cost.trained_expert
        casts += count * cost.cast_parameters
        experts += count * cost.trained_expert
        logits, kept_logits = max(logits, cost.logits_bytes), max(kept_logits, cost.kept_logits_bytes)
        if place in again:
            has = has.with_block(count, gathered, cost.last_parameters)
            makes = makes.with_block(count, made, cost.last_trained)
            block_casts, block_kept = max(block_casts, cost.cast_parameters), max(block_kept, cost.kept_bytes)
            working = max(working, cost.working_bytes)
            if setting.experts_apart:
                apart, apart_made = max(apart, cost.expert_parameters), max(apart_made, cost.trained_expert)
            continue
        before, behind = place < first, place > final
        has = has.with_rest(count, gathered, before=before, behind=behind)
        makes = makes.with_rest(count, made, before=before, behind=behind)
        casts_around += count * cost.cast_parameters
        first_kept += cost.kept_bytes * before
        if before or behind:
            head_working = max(head_working, cost.working_bytes)
    expert_gradients = experts * setting.mechanisms.gradient_bytes if alone else 0.0
    return Held(
        has=has,
        makes=makes,
        casts=casts,
        block_casts=block_casts,
        casts_around=casts_around,
        gradient_bytes=max(0.0, gradient_bytes - expert_gradients),
        expert_gradient_bytes=min(gradient_bytes, expert_gradients),
        kept_bytes=kept_bytes,
        one_kept_bytes=kept_bytes / times if times else 0.0,
        first_kept_bytes=first_kept + block_kept,
        times=times,
        apart=apart,
        apart_made=apart_made,
        working_bytes=working,
        head_bytes=head_working,
        logits_bytes=logits,
        other_logits_bytes=(times - 1) * kept_logits if setting.schedule in FORWARDS_FIRST else 0.0,
    )


def moments(setting: Setting, held: Held) -> Iterator[Moment]:
    """Those of a step that may be its fullest; of several micro-steps the last, whose gradients find others."""
    yield Moment(held.gradients)  # the update
    for moment in _of_shards(setting, held) if setting.zero >= 3 else _of_copies(setting, held):
        others = held.other_logits_bytes if moment.activations else 0.0
        yield moment._replace(logits=moment.logits + others) if others else moment


def _of_shards(setting: Setting, held: Held) -> Iterator[Moment]:
    """FSDP2: gradients are whole from their making to their reduction, in the type that was gathered."""
    how, shard, has, makes = setting.mechanisms, max(1, setting.shard), held.has, held.makes
    wide, reduces, others = how.gather_bytes, how.reduce_bytes, held.kept_bytes - held.one_kept_bytes
    # Autocast's copies of what is not gathered in its type, which the backward asks for.
    casts = how.cast_bytes * (held.casts if setting.recompute == "none" else held.casts_around)
    held = held._replace(kept_bytes=held.kept_bytes + held.times * casts, one_kept_bytes=held.one_kept_bytes + casts)
    if setting.recompute != "none":
        held = held._replace(working_bytes=held.working_bytes + how.cast_bytes * held.block_casts)
    earlier = held.gradients if setting.micro_steps > 1 else 0.0
    # What the micro-step before has reduced last, the rest, FSDP2 keeps until the next one reduces its first block, so
    # that the next forward need not wait for it (FSDPCommContext.reduce_scatter_states).
    late = makes.around * reduces if setting.micro_steps > 1 and setting.pp == 1 else 0.0
    whole = has.whole if setting.keeps_gathered else has.around
    # The shards of two on their way from the host, and of one's gradients on their way there.
    moved = (2 * has.block * how.weight_bytes + makes.block * how.gradient_bytes) / shard
    waits = moved if waits_on_host(setting) else 0.0
    # The first block begins: what was gathered for the rest is there as it came and as parameters; the next one comes.
    begun = (has.around + has.block) * wide
    yield Moment(earlier, 0.0, 0.0, begun + waits, late + begun)
    yield Moment(earlier, held.kept_bytes, held.logits_bytes, whole * wide + waits, late)  # the loss
    yield Moment(earlier + makes.head * wide, held.kept_bytes + held.head_bytes, 0.0, whole * wide + waits, late)
    # One block before: its gradients are being reduced, while this one works, and the next one is gathered ahead.
    made = (makes.head + makes.last) * wide
    coming = 0.0 if setting.keeps_gathered else (has.block - held.apart) * wide
    one = has.block * wide + waits
    underway = (makes.block - held.apart_made) * reduces + coming
    gathered = whole * wide + (waits if setting.keeps_gathered else one)
    # The last one; of experts the buffer that they came in stays until the next gather of a forward, run again or not.
    came = 0.0 if setting.keeps_gathered else max(coming, held.apart * wide)
    yield Moment(earlier + made, held.kept_bytes + held.working_bytes, 0.0, gathered, late + came)
    yield Moment(earlier + made, held.kept_bytes + held.working_bytes, 0.0, gathered, underway)
    around, (reduced, before) = has.around * wide, _reduced(setting, held)
    first = others + min(held.first_kept_bytes, held.one_kept_bytes)
    second = max(earlier, before) + made
    # The second block's backward, which is the last but one.
    yield Moment(second, first + held.working_bytes, 0.0, around + one, underway)
    if held.apart:  # Experts are reduced, and whole no more but for their gradients: the last block's, and the first's.
        whole_made, sent = (makes.head + held.apart_made) * wide, held.apart_made * reduces
        rest = gathered - held.apart * wide
        yield Moment(earlier + whole_made, held.kept_bytes, 0.0, rest, sent + coming)
        yield Moment(max(earlier, before) + whole_made, first, 0.0, around + one - held.apart * wide, sent)
    yield Moment(  # what stands around the blocks is reduced, and whole no more
        gradients=max(earlier, reduced) + makes.around * wide,
        activations=others,
        communication=makes.around * reduces * (1.0 if setting.pp == 1 else 1 + 1 / shard),
    )


def _reduced(setting: Setting, held: Held) -> tuple[float, float]:
    """Bytes of the gradients of all blocks when they are reduced, and of all but one.

    Arithmetic: a part of all gradients as its parameters are of all parameters; FSDP2 reduces block by block
    (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `post_backward`).
    """
    makes, every = held.makes, held.gradient_bytes
    if not makes.whole:
        return held.gradients, held.gradients
    around, block = every * makes.around / makes.whole, every * makes.block / makes.whole
    if held.apart and makes.whole > makes.around:  # experts, which are in blocks, are shared by fewer ranks
        around = setting.mechanisms.gradient_bytes * makes.around / max(1, setting.shard)
        block = (every - around) * makes.block / (makes.whole - makes.around)
    return held.gradients - around, held.gradients - around - block


def _of_copies(setting: Setting, held: Held) -> Iterator[Moment]:
    """Whole parameters, and autocast's copies of them, which its cache holds until a forward ends, a graph longer.

    DDP's buckets hold the gradients between steps, too. What the micro-steps before the last one sum lies beside them:
    torch copies it into the buckets when these are sent (torch/csrc/distributed/c10d/reducer.cpp).
    """
    width, others = setting.mechanisms.cast_bytes, held.kept_bytes - held.one_kept_bytes
    buckets = held.gradient_bytes if setting.dp * setting.cp > 1 and setting.pp == 1 else 0.0
    earlier = buckets + (held.gradients if setting.micro_steps > 1 else 0.0)
    casts = width * (held.casts if setting.recompute == "none" else held.casts_around)
    other_casts = (held.times - 1) * casts
    yield Moment(earlier, held.kept_bytes, gathered=other_casts + width * held.casts)  # the forward's end
    yield Moment(earlier, held.kept_bytes, held.logits_bytes, other_casts + casts)
    yield Moment(earlier, held.kept_bytes + held.head_bytes, 0.0, other_casts + casts)
    made = max(earlier, buckets + held.makes.head * setting.mechanisms.gradient_bytes * (0.0 if buckets else 1.0))
    now = max(casts - width * held.casts_around, width * held.block_casts)
    yield Moment(made, held.kept_bytes + held.working_bytes, 0.0, other_casts + now)
    makes = held.makes
    missing = 0.0 if buckets or setting.micro_steps > 1 or not makes.whole else makes.before / makes.whole
    yield Moment(  # the first block's backward, which is the last one
        gradients=held.gradients - missing * held.gradient_bytes,
        activations=others + min(held.first_kept_bytes, held.one_kept_bytes) + held.working_bytes,
        gathered=other_casts + width * held.block_casts,
    )
