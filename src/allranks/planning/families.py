"""The plain strategies, each at its best: DDP alone, FSDP alone, tp alone and so on, and why each loses or fails."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from allranks.even_cut import divisors
from allranks.layout import Layout
from allranks.plan import Choice, Estimate, Ranked, Refusal
from allranks.planning.choices import CONTEXTS, SCHEDULES, Space, kept_modes, of_layout
from allranks.planning.reasons import why_not
from allranks.planning.search import Search, rank

AXES_ALONE = ("tp", "pp", "cp")
"""Axes that may be too wide for a model: alone, or else as wide as they go, in copies."""


def plain_families(search: Search) -> tuple[list[Ranked], list[Refusal]]:
    """The best of each plain family with its because, and the refusals of those that no rule lets in."""
    space, best = search.space, search.found.best
    ranked: list[Ranked] = []
    refusals: list[Refusal] = []
    total = space.cluster.num_devices
    if total == 1 or space.layout is not None:
        return [], []
    for family, layouts in _whole_families(space).items():
        found, refused = _best_of(search, layouts)
        refusals += refused[:1] if found is None else []
        ranked += [] if found is None else [Ranked(found, why_not(found, best), family)]
    for axis in AXES_ALONE:
        found, refused = _widest(search, axis)
        refusals += refused[:1]
        if found is not None:
            ranked.append(Ranked(found, why_not(found, best), axis))
    return ranked, refusals


def _whole_families(space: Space) -> dict[str, list[Layout]]:
    """The families over the data-parallel ranks alone."""
    total, nodes = space.cluster.num_devices, space.cluster.nodes
    found = {
        "ddp": [Layout(dp_replicate=total)],
        "zero-1": [Layout(dp_shard=total, sharding="optimizer")],
        "fsdp": [Layout(dp_shard=total), Layout(dp_shard=total, sharding="grad_op")],
    }
    if 1 < nodes < total:
        shared: dict[str, Any] = {"dp_replicate": nodes, "dp_shard": total // nodes}
        found["hsdp"] = [Layout(**shared), Layout(**shared, sharding="grad_op")]
    return found


def _widest(search: Search, axis: str) -> tuple[Estimate | None, list[Refusal]]:
    """The best of `axis` alone; where it is refused, of the widest that is let in, copied, and the refusal."""
    total = search.space.cluster.num_devices
    first: list[Refusal] = []
    for degree in reversed(divisors(total)[1:]):
        degrees: dict[str, Any] = {axis: degree, "dp_replicate": total // degree}
        layouts = [Layout(**degrees, **modes) for modes in _ways(search.space, axis)]
        found, refused = _best_of(search, layouts)
        first = first or refused[:1]
        if found is not None:
            return found, first if degree < total else []
    return None, first


def _ways(space: Space, axis: str) -> list[dict[str, Any]]:
    if axis == "pp":
        return [{"schedule": schedule} for schedule in SCHEDULES]
    return [{"context": kind} for kind in space.options("context", CONTEXTS)] if axis == "cp" else [{}]


def _best_of(search: Search, layouts: list[Layout]) -> tuple[Estimate | None, list[Refusal]]:
    """The fastest that fits of all micro-batches and modes, else the one with the least memory; and who is refused."""
    refusals: dict[tuple[str, str], Refusal] = {}
    found = [search.estimate(choice) for layout in layouts for choice in _members(search.space, layout, refusals)]
    fitting = [one for one in found if one.fits]
    if fitting:
        return min(fitting, key=rank), list(refusals.values())
    return min(found, key=lambda one: one.peak_bytes.high, default=None), list(refusals.values())


def _members(space: Space, layout: Layout, refusals: dict[tuple[str, str], Refusal]) -> Iterator[Choice]:
    for recompute, offload in kept_modes(space):
        kept = space.with_fixed(replace(layout, recompute=recompute, offload=offload))
        yield from of_layout(space, kept, refusals)
