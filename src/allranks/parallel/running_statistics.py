"""Running statistics that each data-parallel rank learns by itself: everybody's, their mean, and the first rank's."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from allranks.parallel.average import alike
from allranks.parallel.tensor_ops import all_gather_single

ByRank = dict[str, list[torch.Tensor]]


def gather_by_rank(values: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> ByRank:
    """Name -> the value that each rank of `group` has, in rank order, in memory of its own; collective.

    Every rank has the same names, in one order, and the same shapes. One message a dtype.
    """
    size = dist.get_world_size(group)
    found: ByRank = {name: [] for name in values}
    for names, flat in _flattened(values):
        gathered = flat.new_empty(size * len(flat))
        all_gather_single(gathered, flat, group=group)
        for row in gathered.view(size, -1):
            for name, part in _parted(names, row, values):
                found[name].append(part.clone())
    return found


def mean_of_ranks(ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean over the ranks, of a count the largest: a rank whose place was only filled has counted less."""
    stacked = torch.stack(list(ranks))
    return stacked.double().mean(0).to(stacked.dtype) if stacked.is_floating_point() else stacked.amax(0)


def follow_first(values: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite each value by that of the first rank of `group`; collective. One message a dtype."""
    for names, flat in _flattened(values):
        dist.broadcast(flat, dist.get_global_rank(group, 0), group)
        for name, part in _parted(names, flat, values):
            # Through .data: the backward that still comes may have saved the buffer, and must not find it changed.
            values[name].data.copy_(part)


def _flattened(values: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """For each dtype and device the names of its values, and these one after the other."""
    names = list(values)
    together = [[names[place] for place in places] for places in alike(values.values())]
    return [(some, torch.cat([values[name].detach().reshape(-1) for name in some])) for some in together]


def _parted(
    names: Sequence[str], flat: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    parts = flat.split([like[name].numel() for name in names])
    return [(name, part.view(like[name].shape)) for name, part in zip(names, parts, strict=True)]
