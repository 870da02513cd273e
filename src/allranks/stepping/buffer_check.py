"""Do buffers follow the data? Asked once, at the start, where several data-parallel ranks see other samples each.

Running statistics and codebooks are learnt from the samples of a forward, without a gradient that could be reduced:
each rank would learn its own, and a checkpoint would hold one rank's. A counter of forwards is the same everywhere, and
what a BatchNorm learns is what `layout.batchnorm` says (parallel/batchnorm.py).

A `step` of the user's, or a loop, makes its forwards itself: there ranks are compared once, after the first of them.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from allranks.checkpointing.parts import tensor_digest
from allranks.data.plain_batch import plain_batch
from allranks.data.random_keys import generators_kept, seed_all
from allranks.errors import LayoutError
from allranks.parallel.spread import Spread
from allranks.parameter_map import Entry
from allranks.stepping.alike import everyones
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
    names = _asked(spread)
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
        raise _refusal(spread, found, *((copies, "GPUs") if copies > 1 else (num_ranks, None)))


@final
class FollowingBuffers:
    """The same of forwards that the user's code makes: it compares what the first one has left on the ranks."""

    def __init__(self) -> None:
        self._compared = False

    def compare(self, spread: Spread, *, fed: bool) -> None:
        """Called after each forward, and does it after the first; collective.

        Args:
            fed: whether this rank had samples. The others put their buffers back, and are not asked.

        Raises:
            LayoutError: on every rank; the first buffer is named that was learnt from a rank's own samples.
        """
        group = spread.mesh.gradient_group
        if self._compared or group is None:
            return
        self._compared = True
        members = set(dist.get_process_group_ranks(group))
        names = [name for name in _asked(spread) if _is_whole(spread.map[name], members)]
        if not names:
            return
        told = everyones([fed, [f"{_digest(spread, name):016x}" for name in names]], group, spread.device)
        found = [name for index, name in enumerate(names) if len({digests[index] for had, digests in told if had}) > 1]
        if found:
            raise _refusal(spread, found, len(members), None)


def _asked(spread: Spread) -> list[str]:
    """The buffers that forwards may change in a way that nothing here looks after."""
    asked = (name for name, entry in spread.map.items() if entry.kind == "buffer" and entry.alias_of is None)
    # What a BatchNorm keeps means what the layout says, and what a router counts is added up over the ranks.
    known = {*spread.batch_norms.owners, *spread.balances.names}
    return [name for name in asked if name not in known]


def _is_whole(entry: Entry, ranks: set[int]) -> bool:
    """Whether all of `ranks` have it alike. One that no checkpoint holds may be as long as their longest sequence."""
    return entry.persistent and ranks <= set(entry.holders)


def _digest(spread: Spread, name: str) -> int:
    return tensor_digest(spread.local(name), spread.map[name].box.offset) & ((1 << 64) - 1)


def _refusal(spread: Spread, found: Sequence[str], number: int, what: str | None) -> LayoutError:
    """`number` of `what` see other samples each; None: ranks do."""
    if what is None:
        who = "data-parallel ranks sees" if spread.context is None else "ranks sees samples or positions of"
    else:
        who = f"{what} sees"
    return LayoutError(
        f"buffer {found[0]} ({len(found)} in all) changes with the samples of a forward, and each of {number} {who} "
        "its own only: only BatchNorm's are synchronised; use --layout single"
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
