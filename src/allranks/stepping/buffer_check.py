"""Do buffers follow the data? Asked once, at the start, where several data-parallel ranks see other samples each.

Running statistics and codebooks are learnt from the samples of a forward, without a gradient that could be reduced:
each rank would learn its own, and a checkpoint would hold one rank's. A counter of forwards is the same everywhere, and
what a BatchNorm learns is what `layout.batchnorm` says (parallel/batchnorm.py).
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept, seed_all
from allranks.errors import LayoutError
from allranks.stepping.forward_only import forward_only
from allranks.stepping.kept_state import state_kept
from allranks.stepping.passes import Forward


def check_buffers(forward: Forward, samples: Sequence[Any], group: dist.ProcessGroup | None) -> None:
    """Refuse a model whose training forward leaves in its buffers what depends on the samples; collective.

    The module runs twice, from the same buffers and generators, over equally many other samples: what then differs
    comes from the samples. One sample alone is run against itself, which finds nothing. A buffer that is no part of a
    checkpoint may differ in its shape: it is a table as long as the longest sequence, say, and no statistic.

    It runs as in training: in its training mode, with gradients recorded. Buffers and generators are as before
    afterwards.

    Args:
        samples: the first ones of the dataset, not collated; at least one.
        group: of ranks that see other samples each; None where all see the same.

    Raises:
        LayoutError: on every rank; the first such buffer is named.
    """
    spread = forward.spread
    asked = ((name, entry) for name, entry in spread.map.items() if entry.kind == "buffer" and entry.alias_of is None)
    # What a BatchNorm keeps means what the layout says, and what a router counts is added up over the ranks.
    known = {*spread.batch_norms.owners, *spread.balances.names}
    names = [name for name, _ in asked if name not in known]
    num_ranks, copies = spread.mesh.layout.sample_ranks, _copies(spread.modules.values())
    # Other stages of a pipeline may have some, and no stage runs alone.
    if num_ranks == copies == 1 or (not names and spread.stages is None):
        return
    half = max(1, len(samples) // 2)
    with generators_kept(spread.bare()):
        halves = samples[:half], samples[-half:]
        first, second = (forward_only(partial(_left_behind, forward, some, names)) for some in halves)
    spread.reshard()  # a forward whose backward never came leaves gathered parameters behind
    flags = [_follows(first[name], second[name], persistent=spread.map[name].persistent) for name in names]
    found = [name for name, flag in zip(names, _on_any_rank(flags, spread.device, group), strict=True) if flag]
    if found:
        who = "data-parallel ranks sees" if spread.context is None else "ranks sees samples or positions of"
        if copies > 1:
            num_ranks, who = copies, "GPUs sees"
        raise LayoutError(
            f"buffer {found[0]} ({len(found)} in all) changes with the samples of a forward, and each of "
            f"{num_ranks} {who} its own only: only BatchNorm's are synchronised; use --layout single"
        )


def _copies(called: Iterable[nn.Module]) -> int:
    """GPUs among which nn.DataParallel splits a batch: what its copies leave in buffers is lost but for the first's."""
    return max((len(module.device_ids) for module in called if isinstance(module, nn.DataParallel)), default=0) or 1


def _left_behind(forward: Forward, samples: Sequence[Any], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """What a training forward of these samples leaves in the buffers."""
    module = forward.spread.bare()
    seed_all(0)
    with state_kept(module):
        forward.raw(forward.place(plain_batch(forward.task.collate(list(samples)))), module)
        return {name: forward.spread.tensors[name].detach() for name in names}


def _follows(one: torch.Tensor, other: torch.Tensor, *, persistent: bool) -> bool:
    """Whether two values of a buffer differ; nan is like nan."""
    if one.shape != other.shape:
        return persistent
    alike = (one == other) | ((one != one) & (other != other))
    return not bool(alike.all())


def _on_any_rank(flags: Sequence[bool], device: torch.device, group: dist.ProcessGroup | None) -> list[bool]:
    found = torch.tensor(flags, dtype=torch.float32, device=device)
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return [bool(flag) for flag in found.tolist()]
