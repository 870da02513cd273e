"""The global gradient norm, and clipping by it, over any mixture of placements.

A replicated or tied parameter counts once; a sharded one contributes its parts from every rank of the axes that shard
it. Sums of squares are kept in float32 at least. torch's own `clip_grad_norm_` refuses mixed lists of DTensors and
tensors.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from allranks.parallel.tensor_ops import all_gather_single

EPSILON = 1e-6  # in the denominator, as torch.nn.utils.clip_grad_norm_ has it

# Of a DTensor where it lies (None: a plain tensor), the groups over which what this rank holds was cut before that, and
# the device, where a process has several.
Placing = tuple[tuple[DeviceMesh, tuple[Placement, ...]] | None, tuple[dist.ProcessGroup, ...], Hashable]

Groups = Mapping[int, tuple[dist.ProcessGroup, ...]]
UNCUT: Groups = MappingProxyType({})
WHOLE: Placing = (None, (), None)


def clip_gradients(
    parameters: Sequence[torch.Tensor],
    max_norm: float | None,
    scale: torch.Tensor | None = None,
    cut_over: Groups = UNCUT,
    stages: dist.ProcessGroup | None = None,
    told_elsewhere: Collection[int] = (),
    places: Mapping[int, Hashable] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Multiply every gradient by `scale` * min(1, max_norm / norm), in one pass; collective, no host sync on CUDA.

    Args:
        parameters: tensors whose `.grad` is set (others are passed over), each once.
        max_norm: the largest norm that stays, or None for no clipping.
        scale: a positive 0-dim tensor, or None for 1.
        cut_over: id of a parameter -> the groups that hold the other parts of it, besides what a DTensor says.
        stages: the ranks of a pipeline, each of which has other parameters.
        told_elsewhere: ids of parameters that another of those ranks counts, too.
        places: id of a parameter -> its device, where this process has several.
        device: where sums travel, if gradients wait elsewhere (in the host's memory); the host waits for it then.

    Returns:
        The norm of the scaled gradients before clipping, a 0-dim tensor, equal on every rank; on `device`, by default
        that of the first gradient.
    """
    groups = _group_by_placing(parameters, cut_over) if places is None else _group_by_place(parameters, places)
    if stages is None:
        norm = _total_norm(groups, device)
    else:
        counted = [parameter for parameter in parameters if id(parameter) not in told_elsewhere]
        norm = _over_stages(_total_norm(_group_by_placing(counted, cut_over), device), stages, parameters, device)
    if scale is not None:
        scale = scale.to(norm.device)
        norm = norm * scale
    factor = _factor(norm, max_norm, scale)
    if factor is not None:
        for gradients in groups.values():
            torch._foreach_mul_(gradients, factor.to(gradients[0]))
    return norm


def _factor(norm: torch.Tensor, max_norm: float | None, scale: torch.Tensor | None) -> torch.Tensor | None:
    if max_norm is None:
        return scale
    if norm.device.type == "cpu" and scale is None:
        # The value is at hand: that saves a pass over all gradients that multiplies by one, and some operations.
        clip = max_norm / (norm.item() + EPSILON)
        return None if clip >= 1.0 else torch.tensor(clip, dtype=norm.dtype)
    factor = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    return factor if scale is None else factor * scale


def _group_by_placing(parameters: Sequence[torch.Tensor], cut_over: Groups) -> dict[Placing, list[torch.Tensor]]:
    pairs = [(parameter, gradient) for parameter in parameters if (gradient := parameter.grad) is not None]
    plain = [gradient for _, gradient in pairs]
    if not cut_over and DTensor not in set(map(type, plain)):  # a small model's step would notice the loop below
        return {WHOLE: plain} if plain else {}
    groups: dict[Placing, list[torch.Tensor]] = {}
    for parameter, gradient in pairs:
        over = cut_over.get(id(parameter), ())
        if isinstance(gradient, DTensor):
            placing: Placing = ((gradient.device_mesh, gradient.placements), over, None)
            groups.setdefault(placing, []).append(gradient._local_tensor)
        else:
            groups.setdefault((None, over, None), []).append(gradient)
    return groups


def _group_by_place(
    parameters: Sequence[torch.Tensor], places: Mapping[int, Hashable]
) -> dict[Placing, list[torch.Tensor]]:
    """Foreach kernels take the tensors of one device."""
    groups: dict[Placing, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault((None, (), places[id(parameter)]), []).append(parameter.grad)
    return groups


def _total_norm(groups: dict[Placing, list[torch.Tensor]], device: torch.device | None) -> torch.Tensor:
    if not groups:
        return torch.zeros((), device=device)
    if list(groups) == [WHOLE]:
        return _local_norm(groups[WHOLE]).to(device)
    squares = [_sum_over_shards(_local_norm(own).square().to(device), placing) for placing, own in groups.items()]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt()


def _over_stages(
    norm: torch.Tensor,
    stages: dist.ProcessGroup,
    parameters: Sequence[torch.Tensor],
    device: torch.device | None,
) -> torch.Tensor:
    # A stage may have no gradient at all: its norm of nothing takes the others' dtype and device.
    wide = torch.float64 if any(p.dtype is torch.float64 for p in parameters) else torch.float32
    where = device or (parameters[0].device if parameters else None)
    square = norm.to(dtype=wide, device=where).square()
    return _sum_over(square, stages).sqrt()


def _local_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    wide = gradients[0].dtype if gradients[0].dtype is torch.float64 else torch.float32
    norms = list(torch._foreach_norm(gradients, 2.0, dtype=wide))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _sum_over_shards(square: torch.Tensor, placing: Placing) -> torch.Tensor:
    lying, over, _ = placing
    for group in over:
        square = _sum_over(square, group)
    if lying is not None:
        mesh, placements = lying
        for dim, placement in enumerate(placements):
            if placement.is_shard():
                square = _sum_over(square, mesh.get_group(dim))
    return square


def _sum_over(number: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of a 0-dim number over a group, in the order of its ranks.

    Copies of the model sum the same numbers over groups of their own. NCCL adds in the order of each group's ring: they
    would clip by factors that differ in the last bit, and part.
    """
    if group.size() == 1:
        return number
    parts = number.new_empty(group.size())
    all_gather_single(parts, number.reshape(1), group=group)
    return parts.sum()
