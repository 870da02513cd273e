"""Layouts that are small enough for one machine, and between them exercise what a large one has."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Final

from allranks.errors import LayoutError
from allranks.layout import AXES, PROCESS_AXES, Layout
from allranks.layout_string import TOML_ONLY

MOST_PROCESSES: Final = 8  # what a small machine runs without its ranks waiting for each other past their time limits
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
    first, *others = proposals(layout)
    if not others:
        raise LayoutError(f"{takes}; the nearest that exercises every axis: --layout {first}")
    last = f"--layout {others[-1]}"
    some = ", ".join(f"--layout {words}" for words in (first, *others[:-1]))
    raise LayoutError(
        f"{takes}, and so do all of its axes at 2; these exercise every two of them together, one after the other: "
        f"{some} and {last}"
    )


def proposals(layout: Layout) -> list[str]:
    """Layouts of at most MOST_PROCESSES in which each two of the axes are together once: one where that is enough.

    As words: the layout, and the keys of those of its modes that no layout string takes. What goes with the degrees
    goes with these, too: none that is above 1 becomes 1, but for the axes that are left out.
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
    if layout.offloads_parameters and "dp_shard" not in kept:
        modes["offload"] = "activations" if layout.offloads_activations else "none"
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
