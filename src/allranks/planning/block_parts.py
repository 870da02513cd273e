"""A profile's blocks under one Setting: what each costs, kept for the next configuration that shares it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from allranks.cluster import Cluster
from allranks.model_profile import ModelProfile
from allranks.planning.axis_traffic import Axes, axes_of
from allranks.planning.block_cost import Around, BlockCost, BlockWork, Parameters, block_cost, block_work
from allranks.planning.setting import Setting


@final
@dataclass(frozen=True, slots=True)
class Parts:
    """A profile's blocks under one Setting; kept for the next call that differs in nothing that they depend on."""

    profile: ModelProfile
    cluster: Cluster
    axes: Axes
    costs: tuple[BlockCost, ...]


_CACHE: dict[tuple[object, ...], Parts] = {}
_COSTS: dict[tuple[object, ...], tuple[BlockCost, ...]] = {}
_WORK: dict[tuple[object, ...], tuple[ModelProfile, Cluster, tuple[BlockWork, ...]]] = {}
_CACHE_SIZE = 20_000


def parts_of(profile: ModelProfile, cluster: Cluster, setting: Setting) -> Parts:
    """The Parts of a Setting, made anew only as far as nobody has asked for them yet."""
    # Profiles and clusters are held by what is kept, so their ids are not given to others.
    of_work = (
        id(profile), id(cluster), setting.tp, setting.cp, setting.ep, setting.micro_batch, setting.precision,
        setting.ring, setting.frozen, setting.mechanisms, setting.cuts_positions, setting.world_size,
    )  # fmt: skip
    key = (of_work, setting.recompute, setting.dp, setting.pp, setting.shard)
    found = _CACHE.get(key)
    if found is not None:
        return found
    if len(_CACHE) >= _CACHE_SIZE:
        forget()
    axes = axes_of(cluster, setting)
    parts = _CACHE[key] = Parts(profile, cluster, axes, _costs(of_work, profile, cluster, setting, axes))
    return parts


def forget() -> None:
    """Drop what is kept: there is too much of it, or constants have changed that it was made with."""
    for cache in (_CACHE, _COSTS, _WORK):
        cache.clear()


def _costs(
    of_work: tuple[object, ...], profile: ModelProfile, cluster: Cluster, setting: Setting, axes: Axes
) -> tuple[BlockCost, ...]:
    """A block costs the same whoever shares it, and however many copies there are."""
    key = (of_work, setting.recompute)
    if key not in _COSTS:
        if of_work not in _WORK:
            work = tuple(block_work(block, setting, axes, profile.experts) for block in profile.blocks)
            _WORK[of_work] = profile, cluster, work
        pairs = zip(profile.blocks, _WORK[of_work][2], strict=True)
        _COSTS[key] = tuple(block_cost(block, setting, work) for block, work in pairs)
    return _COSTS[key]


def parameters_of(parts: Parts, held: tuple[int, ...]) -> Parameters:
    """Those of a stage that holds so many of each block."""
    return add_up([(n, cost) for n, cost in zip(held, parts.costs, strict=True) if n])


def around_of(parts: Parts, held: tuple[int, ...]) -> Around:
    """What such a stage holds in blocks that do not repeat."""
    blocks = zip(held, parts.profile.blocks, parts.costs, strict=True)
    here = [(n, cost) for n, block, cost in blocks if n and not block.repeated]
    return Around(sum(n for n, _ in here), add_up(here))


def add_up(here: Sequence[tuple[int, BlockCost]]) -> Parameters:
    """Those of so many of each block: arithmetic, a sum."""
    return Parameters(
        sum(n * cost.parameters for n, cost in here),
        sum(n * cost.expert_parameters for n, cost in here),
        sum(n * cost.trained for n, cost in here),
        sum(n * cost.trained_expert for n, cost in here),
    )
