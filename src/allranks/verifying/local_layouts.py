"""Layouts that are small enough for one machine, and between them exercise what a large one has."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Final

from allranks.config_sections import LayoutConfig
from allranks.errors import LayoutError
from allranks.layout import AXES, PROCESS_AXES, Layout, render_layout
from allranks.layout_string import TOML_ONLY

MOST_PROCESSES: Final = 8  # what a small machine runs without its ranks waiting for each other past their time limits
NO_OFFLOAD: Final = "since all memory is the host's where processes run on CPUs"
MOST_AXES: Final = 3
"""Each of two processes."""
# What says something of ranks that are there only with one of these axes: to what it is set without them.
_MODES: Final = {
    "schedule": (("pp",), "1f1b"),
    "context": (("cp",), "ulysses"),
    "sharding": (("dp_shard",), "full"),
    "batchnorm": (("dp_replicate", "dp_shard"), None),
}


def refuse_too_many(layout: Layout, nproc: int, written: str) -> None:
    """Raise LayoutError for more processes than run here, with layouts that do; `written`: as the user has it."""
    if nproc <= MOST_PROCESSES:
        return
    takes = f"{written} takes {nproc} processes, more than the {MOST_PROCESSES} that run on one machine"
    raise LayoutError(f"{takes}{_nearest(layout)}")


def _nearest(layout: Layout) -> str:
    """The end of a refusal: what runs in place of this layout."""
    first, *others = proposals(layout)
    without = f", without offload={layout.offload}, {NO_OFFLOAD}" if layout.offload != "none" else ""
    if not others:
        return f"; the nearest that exercises every axis{without}: --layout {first}"
    last = f"--layout {others[-1]}"
    some = ", ".join(f"--layout {words}" for words in (first, *others[:-1]))
    return (
        f", and so do all of its axes at 2; these exercise every two of them together, one after the other{without}: "
        f"{some} and {last}"
    )


def refuse_offload(layout: Layout) -> None:
    """Raise LayoutError for what waits in the host's memory, with the layout that is the same but for that."""
    if layout.offload == "none":
        return
    words = _words(replace(layout, offload="none"))
    raise LayoutError(
        f"offload={layout.offload} has no place here, {NO_OFFLOAD}; it says where values wait, and not what is "
        f"computed: verify --layout {words}"
    )


def refuse_unexercised(asked: LayoutConfig, layout: Layout) -> None:
    """Raise LayoutError where a layout has nothing, or less than its words say, that spreads over processes here.

    That would be answered "equal" without a look at what was asked.

    Args:
        asked: as the user wrote it.
        layout: what that is here.
    """
    if layout.kind == "data_parallel":
        spread = _words(replace(layout, kind="mesh", dp_replicate=2, offload="none"))
        raise LayoutError(
            "data_parallel is one process on several GPUs, and verify compares processes on CPUs: nothing of it would "
            f"run; the nearest that does is ddp: --layout {spread}"
        )
    if layout.kind == "placement" and layout.world_size == 1:
        others = any(not device.startswith("cpu") for _, device in layout.placement)
        rules = "without the rules of [layout.placement] that name GPUs, " if others else ""
        raise LayoutError(
            "placement is one process on several devices, and verify compares processes on CPUs, which are one memory: "
            f"it cannot be verified; its copies can, {rules}with --layout {_words(replace(layout, dp_replicate=2))}"
        )
    alone = _alone(asked, layout)
    if alone:
        told = " and ".join(f"{axis}={getattr(asked, axis)}" for axis in alone)
        hosts = " (its copies are one for each host, and this is one)" if "nodes" in told else ""
        wanted = replace(layout, **{axis: 2 for axis in alone})  # type: ignore[arg-type]
        raise LayoutError(
            f"{render_layout(asked)} on {layout.world_size} processes is {layout}: {told} would be 1, and nothing of "
            f"it compared{hosts}{_nearest(wanted)}"
        )


def _alone(asked: LayoutConfig, layout: Layout) -> list[str]:
    """The axes that the user has asked for, and that are 1 here."""
    written = {axis: getattr(asked, axis) for axis in PROCESS_AXES}
    left = layout.world_size // math.prod(degree for degree in written.values() if isinstance(degree, int))
    return [axis for axis, degree in written.items() if degree == "nodes" or (degree == "*" and left == 1)]


def proposals(layout: Layout) -> list[str]:
    """Layouts of at most MOST_PROCESSES in which each two of the axes are together once: one where that is enough.

    As words: the layout, and the keys of those of its modes that no layout string takes. What goes with the degrees
    goes with these, too: none that is above 1 becomes 1, but for the axes that are left out. Without offload, which a
    CPU refuses.
    """
    axes = [axis for axis in PROCESS_AXES if getattr(layout, axis) > 1]
    if len(axes) <= MOST_AXES:
        return [_words(_with(layout, axes))]
    found, left = [], set(combinations(axes, 2))
    while left:
        new = max((left & set(combinations(some, 2)) for some in combinations(axes, MOST_AXES)), key=len)
        found.append(_words(_with(layout, [axis for axis in axes if any(axis in pair for pair in new)])))
        left -= new
    return found


def _with(layout: Layout, axes: Iterable[str]) -> Layout:
    """The layout with these axes at 2, and without the others and their modes."""
    kept = set(axes)
    kept |= {"ep"} if layout.ep > 1 and kept & {"dp_replicate", "dp_shard"} else set()
    modes = {mode: value for mode, (owners, value) in _MODES.items() if not kept & set(owners)}
    if layout.sharding == "none" and "dp_replicate" in kept:
        del modes["sharding"]  # its ranks are all copies
    modes["offload"] = "none"
    return replace(layout, **{axis: 2 if axis in kept else 1 for axis in AXES}, **modes)  # type: ignore[arg-type]


def _words(layout: Layout) -> str:
    rules = "placement"  # the user's own, which stay where they were given
    beside = {name: value for name, value in layout.differing() if name in TOML_ONLY and name != rules}
    return " ".join([str(layout), *(f"layout.{name}={str(value).lower()}" for name, value in beside.items())])


def refuse_exceptions(layout: Layout) -> None:
    """What sends less than the gradients by design has a law of its own. Raises LayoutError."""
    asked = [f"layout.ddp_hook={layout.ddp_hook}"] if layout.ddp_hook != "none" else []
    asked += [f"layout.local_sgd={layout.local_sgd}"] if layout.local_sgd is not None else []
    if asked:
        raise LayoutError(
            f"{' and '.join(asked)}: computes something else than one device by design, so that there is nothing to "
            "compare (docs/explanation/exceptions.md has what it is held to): verify without it"
        )
