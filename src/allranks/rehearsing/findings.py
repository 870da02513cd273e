"""What the rehearsal of one rank finds that wastes memory, learns nothing, or fails under another layout."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel.blocks import find_blocks, nearest_to
from allranks.parallel.sequences import find_sequences
from allranks.parallel.spread import Spread
from allranks.parameter_map import Entry
from allranks.rehearsal import Finding
from allranks.task import Hints

LARGE_BYTES = 1 << 20
"""What is smaller may lie whole on every rank."""
BLOCK_BY_BLOCK = "a layout with pp, FSDP, recompute, offload or compile"
"""Those that look for the model's blocks."""


def find_own(hints: Hints, spread: Spread, batch: Any, unreached: Sequence[str]) -> tuple[Finding, ...]:
    """All that is said of one rank; `unreached`: the parameters that no loss of its step has updated."""
    modules = {which: spread.bare(which) for which in spread.modules}
    idle = unmatched(hints, spread.mesh.layout, modules, batch)
    return (*unsharded(spread), *without_gradient(unreached), *idle)


def unsharded(spread: Spread) -> list[Finding]:
    """Large parameters that lie, or are gathered, whole where the layout cuts others."""
    found: list[Finding] = []
    for name, entry in spread.map.items():
        tensor = spread.tensors[name]
        if entry.kind != "parameter" or entry.alias_of is not None or tensor.is_meta:
            continue
        if tensor.numel() * tensor.element_size() >= LARGE_BYTES:
            found += _uncut(f"{name} ({list(entry.shape)})", entry, spread.mesh.layout)
    return found


def _uncut(which: str, entry: Entry, layout: Layout) -> list[Finding]:
    gathered = layout.fully_sharded and layout.dp_shard > 1
    if gathered and not entry.sharded:
        why = f"dp_shard={layout.dp_shard} ranks share its first dim, which is {entry.shape[0]}"
        return [Finding("unsharded", f"{which} lies whole on this rank: {why}", "let its first dim be a long one")]
    cut = {axis for axis, how in entry.placements.items() if how != "replicate"}
    if layout.tp == 1 or cut & {"tp", "ep"} or (entry.sharded and not gathered):
        return []
    what = f"{which} lies whole on each of tp={layout.tp} ranks"
    if gathered:
        what = f"{which} is cut over dp_shard alone: each of tp={layout.tp} ranks gathers it whole, and uses all of it"
    return [Finding("unsharded", what, 'name its module in hints().tensor ("colwise", "rowwise", "vocab")')]


def unmatched(hints: Hints, layout: Layout, modules: Mapping[str, nn.Module], batch: Any) -> list[Finding]:
    """Hints of axes that the layout lacks, and that match nothing; those that it uses are refused where they are used.

    Args:
        modules: the user's, by name; batch: of a micro-step.
    """
    members = [(which, name) for which, module in modules.items() for name, _ in module.named_modules() if name]
    names = {name for _, name in members} | {f"{which}.{name}" for which, name in members if which}
    found = []
    for pattern in hints.blocks:
        try:
            find_blocks(modules, (pattern,))
        except LayoutError as error:
            found.append(Finding("hint", str(error), f"mend it: {BLOCK_BY_BLOCK} is refused by it"))
    for axis, field, patterns in (("tp", "tensor", hints.tensor), ("pp", "split_before", hints.split_before)):
        for pattern in patterns if getattr(layout, axis) == 1 else ():
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"hints().{field}: {pattern!r} matches no module; {nearest_to(pattern, names)}"
                found.append(Finding("hint", what, f"mend it: a layout with {axis} is refused by it"))
    if hints.sequence_dims and layout.cp == 1:
        try:
            find_sequences(batch, (), hints.sequence_dims)
        except LayoutError as error:
            found.append(Finding("hint", str(error), "mend it: a layout with cp is refused by it"))
    return found


def without_gradient(names: Sequence[str]) -> list[Finding]:
    """Parameters that the step's loss does not reach."""
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = f"{names[0]}{more} get no gradient"
    return [
        Finding(
            "no gradient", what, "leave them out of the model, freeze them, or name their modules in hints().optional"
        )
    ]
