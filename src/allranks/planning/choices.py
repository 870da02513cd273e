"""What there is to choose from: every configuration that the engine runs on a cluster, in groups that cost alike.

A group fixes what a forward and a backward cost: degrees, schedule, micro-batch, precision. Its members differ in who
holds the state and what is kept: sharding, recompute, offload.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any, final

from allranks.cluster import Cluster
from allranks.even_cut import divisors
from allranks.layout import ONE_STAGE_EACH, Layout, Sharding
from allranks.layout_refusals import SPLIT_BACKWARD
from allranks.model_profile import ModelProfile
from allranks.plan import Choice, Refusal
from allranks.planning.micro_step_rules import OF_MICRO_BATCH
from allranks.planning.rules import check, check_modes
from allranks.upkeep import Upkeep

SCHEDULES = (*ONE_STAGE_EACH, "interleaved", "looped_bfs", *SPLIT_BACKWARD)
RECOMPUTES = ("none", "selective", "full")
OFFLOADS = ("none", "activations")
CONTEXTS = ("ulysses", "ring")
SEARCHED = ("recompute", "offload", "schedule", "sharding", "context")
"""Modes that a search varies."""
SHARED: tuple[Sharding, ...] = ("full", "grad_op", "optimizer")
"""`none` is left out: it computes and keeps what DDP does."""


@final
@dataclass(frozen=True)
class Space:
    """Everything that a search may take.

    Attributes:
        profiles: of the model, by precision; those that are open.
        modes: what the user fixed of the modes of a layout; those that no search varies stand in every layout.
        micro_batch: fixed too, or None.
        micro_steps: of a task whose statistics or loss depend on them (law 2): the micro-batch follows.
        layout: the one that the user wrote; None where the search takes any.
        upkeep: what every run does besides, whatever its layout.
    """

    profiles: Mapping[str, ModelProfile]
    cluster: Cluster
    global_batch: int
    micro_batch: int | None = None
    modes: Mapping[str, object] = field(default_factory=dict)
    micro_steps: int | None = None
    layout: Layout | None = None
    upkeep: Upkeep = field(default_factory=Upkeep)

    def options(self, mode: str, all_of_them: tuple[str, ...]) -> tuple[str, ...]:
        """The one that the user fixed, or all."""
        fixed = self.modes.get(mode)
        return all_of_them if fixed is None else (str(fixed),)

    def layouts(self, profile: ModelProfile) -> Iterator[Layout]:
        """`layouts` of the cluster, each with the modes that the user fixed and no search varies."""
        for layout in layouts(self.cluster, profile):
            if layout.cp == 1 or layout.context == self.modes.get("context", layout.context):
                yield self.with_fixed(layout)

    def with_fixed(self, layout: Layout) -> Layout:
        """`layout` with these modes."""
        fixed: dict[str, Any] = {name: value for name, value in self.modes.items() if name not in SEARCHED}
        return replace(layout, **fixed) if fixed else layout

    def micro_batches(self, layout: Layout) -> list[int]:
        """What divides a data-parallel rank's share of the batch, ascending; powers of two where no pipeline asks."""
        if self.micro_batch is not None:
            return [self.micro_batch]
        share = -(-self.global_batch // layout.dp)
        if self.micro_steps is not None:
            return [-(-share // self.micro_steps)]
        found = set(divisors(share))
        if layout.pp == 1:
            found |= {2**place for place in range(share.bit_length()) if 2**place <= share}
        return sorted(found)


@final
@dataclass(frozen=True, slots=True)
class Group:
    """Choices that differ in sharding, recompute and offload alone; `plain` has none of these."""

    profile: ModelProfile
    plain: Choice


def layouts(cluster: Cluster, profile: ModelProfile) -> Iterator[Layout]:
    """Every way to write the devices as dp_replicate * tp * cp * pp, with each ep; cp ascending."""
    total = cluster.num_devices
    for cp in divisors(total):
        for pp, tp in product(divisors(total // cp), repeat=2):
            dp, left = divmod(total, cp * pp * tp)
            if left == 0:
                for ep in divisors(dp) if profile.experts else (1,):
                    kinds = CONTEXTS if cp > 1 else CONTEXTS[:1]
                    for kind in kinds:
                        yield make_layout(dp_replicate=dp, tp=tp, cp=cp, pp=pp, ep=ep, context=kind)


def make_layout(**degrees: Any) -> Layout:
    """A Layout of these degrees and modes; of one process it is `single`."""
    layout = Layout(**degrees)
    return replace(layout, kind="single") if layout.world_size == 1 else layout


def groups(
    space: Space, precision: str, layout: Layout, schedules: tuple[str, ...], refusals: dict[tuple[str, str], Refusal]
) -> Iterator[Group]:
    """The groups of a layout without modes; what a rule refuses is noted in `refusals`.

    That there are too few micro-steps, or too many, only where no micro-batch and schedule is let in.
    """
    profile, of_batches, let_in = space.profiles[precision], list[Refusal](), False
    for schedule in space.options("schedule", schedules) if layout.pp > 1 else ("1f1b",):
        made = replace(layout, schedule=schedule)
        chunks = made.num_stages // made.pp
        for micro_batch in space.micro_batches(made):
            choice = Choice(made, space.global_batch, micro_batch, precision, chunks, space.upkeep)
            refusal = check(profile, space.cluster, choice)
            if refusal is None:
                let_in = True
                yield Group(profile, choice)
                continue
            if refusal.rule not in OF_MICRO_BATCH:
                refusals.setdefault((refusal.rule, refusal.layout), refusal)
                break  # another micro-batch does not help
            of_batches.append(refusal)
    if of_batches and not let_in:
        refusals.setdefault((of_batches[0].rule, of_batches[0].layout), of_batches[0])


def splits(space: Space, layout: Layout) -> tuple[Layout, ...]:
    """Whole copies, and every way to share one copy's state among some or all of the data-parallel ranks."""
    return _splits(layout, space.options("sharding", SHARED), _text(space.modes.get("sharding")))


def _text(mode: object) -> str | None:
    return None if mode is None else str(mode)


@lru_cache(maxsize=4096)
def _splits(layout: Layout, shardings: tuple[str, ...], fixed: str | None) -> tuple[Layout, ...]:
    found = [layout]
    for shards in divisors(layout.dp)[1:]:
        for sharding in shardings:
            changes: dict[str, Any] = {"dp_replicate": layout.dp // shards, "dp_shard": shards, "sharding": sharding}
            found.append(replace(layout, **changes))
    if fixed is not None and len(found) > 1:
        return (replace(layout, sharding="none"),) if fixed == "none" and layout.dp > 1 else tuple(found[1:])
    return tuple(found)


def members(
    space: Space, group: Group, shared: Iterable[Layout] | None = None, kept: tuple[tuple[str, str], ...] | None = None
) -> Iterator[Choice]:
    """The choices of a group that no rule refuses; of `shared` splits and `kept` (recompute, offload) alone."""
    pairs = kept_modes(space) if kept is None else kept
    for layout in splits(space, group.plain.layout) if shared is None else shared:
        for recompute, offload in pairs:
            choice = replace(group.plain, layout=_with_modes(layout, recompute, offload))
            if check_modes(group.profile, space.cluster, choice) is None:
                yield choice


@lru_cache(maxsize=65536)
def _with_modes(layout: Layout, recompute: str, offload: str) -> Layout:
    return replace(layout, recompute=recompute, offload=offload)


def kept_modes(space: Space) -> tuple[tuple[str, str], ...]:
    """The pairs of recompute and offload that are open.

    No search fills the vendor's host by itself: whether these nodes are the vendor's nobody has said.
    """
    offloads = OFFLOADS[:1] if space.cluster.takes_vendors_host else OFFLOADS
    return tuple(product(space.options("recompute", RECOMPUTES), space.options("offload", offloads)))


def of_layout(space: Space, layout: Layout, refusals: dict[tuple[str, str], Refusal]) -> Iterator[Choice]:
    """The choices that have this very layout, in every open precision and micro-batch; refused ones are noted.

    Too few micro-steps or too many as in `groups`.
    """
    for precision, profile in space.profiles.items():
        of_batches, let_in = list[Refusal](), False
        for micro_batch in space.micro_batches(layout):
            chunks = layout.num_stages // layout.pp
            choice = Choice(layout, space.global_batch, micro_batch, precision, chunks, space.upkeep)
            if (refusal := check(profile, space.cluster, choice)) is None:
                let_in = True
                yield choice
            elif refusal.rule in OF_MICRO_BATCH:
                of_batches.append(refusal)
            else:
                refusals.setdefault((refusal.rule, refusal.layout), refusal)
        if of_batches and not let_in:
            refusals.setdefault((of_batches[0].rule, of_batches[0].layout), of_batches[0])


def every_choice(space: Space) -> Iterator[Choice]:
    """All of them, one by one: what the search has to find the best of."""
    for precision, profile in space.profiles.items():
        for layout in space.layouts(profile):
            for group in groups(space, precision, layout, SCHEDULES, {}):
                yield from members(space, group)
