"""What the rehearsal of one rank finds that wastes memory, or learns nothing."""

from collections.abc import Sequence

from allranks.parallel.spread import Spread
from allranks.rehearsal import Finding

LARGE_BYTES = 1 << 20
"""What is smaller may lie whole on every rank."""


def unsharded(spread: Spread) -> list[Finding]:
    """Parameters that every rank of a cut layout holds whole."""
    layout = spread.mesh.layout
    found = []
    for name, entry in spread.map.items():
        tensor = spread.tensors[name]
        if entry.kind != "parameter" or entry.alias_of is not None or tensor.is_meta:
            continue
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < LARGE_BYTES or entry.sharded:
            continue
        if layout.fully_sharded and layout.dp_shard > 1:
            what = f"{name} ({list(entry.shape)}) lies whole on each of dp_shard={layout.dp_shard} ranks"
            found.append(
                Finding("unsharded", what, "make it a parameter of a module that FSDP gathers (at least 1 dim)")
            )
        elif layout.tp > 1 and not layout.fully_sharded:
            what = f"{name} ({list(entry.shape)}) lies whole on each of tp={layout.tp} ranks"
            found.append(
                Finding("unsharded", what, 'name its module in hints().tensor ("colwise", "rowwise", "vocab")')
            )
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
