"""Groups beside a mesh's own, over which the units of an FSDP module travel through gloo, each size apart."""

import math
from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

SPARE = 0  # no unit's id: what a rank has to ask travels apart from all messages of units
MOST_LINES = 9  # groups with threads and sockets: units of further sizes share the first
# By the world that they are part of, and the groups that it is divided into.
_LINES = WeakKeyDictionary[dist.ProcessGroup, dict[tuple[tuple[int, ...], ...], list[dist.ProcessGroup]]]()


def open_lines(module: nn.Module, mesh: DeviceMesh, apart: Collection[nn.Module] = ()) -> dict[int, dist.ProcessGroup]:
    """Id of a unit's state -> the group that it travels over, one for each size of unit; and one of all of `mesh`.

    Units that are `apart`, over another mesh, are not among them.

    gloo ends the process where a message is longer than what is expected, as it would be where the ranks enter units of
    unequal size; over groups of their own they wait, and find out (`parting`).
    """
    sizes, group = dict[int, int](), mesh.get_group(mesh.ndim - 1)
    _add_sizes(module, 0, dist.get_world_size(group), sizes, apart)
    distinct = list(dict.fromkeys(sizes.values()))
    spare = _extra_lines(sorted(mesh.mesh.flatten().tolist()), 1)[0]
    if dist.get_world_size(group) == 1:
        return {SPARE: spare}
    spares = int(mesh.ndim == 1)  # without copies it is the first of these
    others = _extra_lines(dist.get_process_group_ranks(group), len(distinct) - 1 + spares)[spares:]
    lines = dict(zip(distinct, [group, *others], strict=False))
    return {SPARE: spare, **{unit: lines.get(size, group) for unit, size in sizes.items()}}


def _extra_lines(ranks: list[int], wanted: int) -> list[dist.ProcessGroup]:
    """Groups of these ranks: as many as any rank of the world wants, those that are there taken again.

    All ranks of the world make all of them, in one order. A group that its members alone make is named after what each
    of them has made before, and where that differs between them they wait for each other forever (torch 2.13).
    """
    own = torch.tensor([min(wanted, MOST_LINES - 1), *ranks])
    told = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(told, own)
    parts = tuple(dict.fromkeys(tuple(ranks) for _, *ranks in map(torch.Tensor.tolist, told)))
    world = dist.group.WORLD
    assert world is not None
    known = _LINES.setdefault(world, {}).setdefault(parts, [])
    for _ in range(len(known), max(int(row[0]) for row in told)):
        made = {part: dist.new_group(list(part), backend="gloo") for part in parts}
        known.append(made[tuple(ranks)])
    return known


def _add_sizes(
    module: nn.Module, unit: int, num_ranks: int, sizes: dict[int, int], apart: Collection[nn.Module]
) -> None:
    """Add the elements that a rank gives when `module`, a part of `unit`, is gathered; units in it are their own."""
    if module in apart:
        return
    if isinstance(module, FSDPModule):
        unit = id(module._get_fsdp_state())
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor) and parameter.dim():
            cut = cut_dim(parameter)
            others = math.prod(extent for dim, extent in enumerate(parameter.shape) if dim != cut)
            sizes[unit] = sizes.get(unit, 0) - (-parameter.shape[cut] // num_ranks) * others
    for child in module.children():
        _add_sizes(child, unit, num_ranks, sizes, apart)


def cut_dim(parameter: DTensor) -> int:
    """The dim along which `fully_shard` has cut it: over the last dim of its mesh."""
    placement = parameter.placements[-1]
    assert isinstance(placement, Shard)
    return placement.dim
