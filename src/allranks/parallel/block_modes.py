"""The modes of a Layout that change how a block runs: recompute, offload and compile.

They put another forward in place of the block's own and leave the module where it is, so that nothing is renamed, and
what FSDP and DDP hang around a block stays outside. From the inside out: the user's forward, what is kept of it
(selective), its compiled form, the second run in the backward, the copies in the host's memory.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.parallel import host_parameters
from allranks.parallel.compiled import MEMORY_BUDGET, compile_forward
from allranks.parallel.offload import Offloader
from allranks.parallel.recompute import recompute, selective, selective_in_graph
from allranks.verdict import Decision

Forward = Callable[..., Any]


def changes_blocks(layout: Layout) -> bool:
    """Whether a mode of `layout` changes how blocks run."""
    return layout.offloads_activations or (layout.recompute, layout.compile) != ("none", "none")


def change_blocks(
    modules: Mapping[str, nn.Module], found: Mapping[str, Sequence[str]], layout: Layout, device: torch.device
) -> list[Decision]:
    """Give every block the forward of the layout's modes, in place; what was done is returned in words.

    Args:
        modules: the user's, by name.
        found: the names of each one's blocks, as `find_blocks` gives them.
        device: where they run.

    Raises:
        LayoutError: there is no block, or nothing to move activations away from.
    """
    if not changes_blocks(layout):
        return []
    if layout.offloads_activations and not host_parameters.has_own_memory(device):
        raise LayoutError(
            f"offload={layout.offload} moves what waits for the backward from an accelerator to the host's memory, and "
            "this device is the CPU: leave it out, or use recompute=full"
        )
    check_found(found, layout)
    names = {f"{which}.{name}" if which else name: (which, name) for which in found for name in found[which]}
    offloader = Offloader(device) if layout.offloads_activations else None
    for logical, (which, name) in names.items():
        block = modules[which].get_submodule(name)
        # An attribute of this one module, before its class's.
        block.forward = _changed(logical, block, layout, offloader)
    return _describe(list(names), layout)


def check_found(found: Mapping[str, Sequence[str]], layout: Layout) -> None:
    """LayoutError where a mode of `layout` changes blocks, and `find_blocks` has found none."""
    if changes_blocks(layout) and not any(found.values()):
        raise LayoutError(
            f"{' and '.join(_written(layout))} changes the model block by block, and no part of it repeats: name its "
            "parts in hints().blocks"
        )


def _changed(name: str, block: nn.Module, layout: Layout, offloader: Offloader | None) -> Forward:
    forward: Forward = block.forward
    compiled = layout.compile == "block"
    in_graph = compiled and layout.recompute == "selective"
    if in_graph:
        # Inside, because compiled code hides its operations from what would keep some of them.
        forward = wraps(forward)(partial(checkpoint, forward, use_reentrant=False, context_fn=selective_in_graph))
    if compiled:
        forward = compile_forward(name, forward, whole=in_graph, budget=layout.recompute == "budget")
    if layout.recompute == "full":
        forward = recompute(name, block, forward)
    elif layout.recompute == "selective" and not in_graph:
        forward = recompute(name, block, forward, selective)
    return forward if offloader is None else offloader.offload(block, forward)


def _written(layout: Layout) -> list[str]:
    modes = {name: getattr(layout, name) for name in ("recompute", "offload", "compile")}
    return [f"{name}={value}" for name, value in modes.items() if value != "none"]


_RECOMPUTED = {
    "full": ("are computed again in the backward", "between the two only their inputs and outputs are kept"),
    "selective": (
        "are computed again in the backward, but for what is expensive",
        "attention, convolutions and every second matrix product are kept",
    ),
    "budget": (
        "are computed again in the backward where that is cheap",
        f"torch.compile keeps {MEMORY_BUDGET:.0%} of the activations that it would keep",
    ),
}


def _describe(names: Sequence[str], layout: Layout) -> list[Decision]:
    count = f"{len(names)} block{'s' * (len(names) > 1)}"
    some = ", ".join(names[:3]) + " ..." * (len(names) > 3)
    found = []
    if layout.recompute in _RECOMPUTED:
        what, why = _RECOMPUTED[layout.recompute]
        found.append(Decision(f"the activations of {count} {what}", f"recompute={layout.recompute}: {why} ({some})"))
    if layout.offloads_activations:
        why = f"offload={layout.offload}: they come back one block ahead of the backward"
        found.append(Decision(f"what {count} keep for the backward waits in the host's memory", f"{why} ({some})"))
    if layout.compile == "block":
        why = "compile=block: equal blocks share one graph; dropout draws other masks than uncompiled"
        found.append(Decision(f"{count} run compiled, from their first call on", f"{why} ({some})"))
    return found
