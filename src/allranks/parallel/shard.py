"""The dp_shard axis: FSDP2 (`torch.distributed.fsdp.fully_shard`) unit by unit."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from allranks.parallel.blocks import Unit
from allranks.parallel.gloo_ops import Reductions, gather_through_gloo
from allranks.parallel.initial import Placer
from allranks.parallel.mesh import Mesh
from allranks.parallel.outputs import map_tensors
from allranks.parallel.path import Path
from allranks.parallel.reaching import follow_reductions


def shard(
    module: nn.Module,
    units: Sequence[Unit],
    mesh: Mesh,
    policy: MixedPrecisionPolicy,
    placer: Placer,
    path: Path | None = None,
    offload: OffloadPolicy | None = None,
    experts: Collection[nn.Module] = (),
) -> None:
    """Shard `module` in place over `mesh`, each unit placed and filled just before it is cut; collective.

    Args:
        units: tuples of module names that are gathered together; what is in none is the root's.
        policy: in which type a unit is gathered.
        placer: gives each unit its values; after the cut only this rank's part stays.
        path: notes which units the forwards enter and the backwards reduce.
        offload: where the shards wait; by default on the device.
        experts: units of their own, over `mesh.expert_mesh`.

    Parameters without dims cannot be cut, and other experts are cut over ep alone: they stay as they are, and
    `reduce_scalars` reduces their gradients.
    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    device_mesh = mesh.shard_mesh
    # None is torch's own choice for full sharding: every unit but the root, whose parameters the backward needs first.
    reshard = None if mesh.layout.sharding == "full" else False
    how: Any = {"mp_policy": policy, "offload_policy": offload or OffloadPolicy(), "reshard_after_forward": reshard}
    names = _shard_experts(module, experts, mesh, placer, how)
    units = [unit for names in units if (unit := tuple(n for n in names if module.get_submodule(n) not in experts))]
    parts = [[module.get_submodule(name) for name in names] for names in units]
    for part in (*parts, [module]):
        for member in part:
            placer.place(member)
            member.register_forward_hook(_give_own_memory)
        # Nor is cut what other stages of a pipeline hold.
        alone = {p for member in part for p in member.parameters() if placer.stays(p) or p.is_meta}
        target = part if len(part) > 1 else part[0]
        fully_shard(target, mesh=device_mesh, ignored_params=alone, **how)
        placer.forget_cut()
    if mesh.layout.prefetch is not None:
        _gather_ahead([module, *(part[0] for part in parts)], mesh.layout.prefetch)
    # Who recomputes blocks wants memory rather than time.
    travel: Any = {"overlap": mesh.layout.recompute != "full", "staged": mesh.layout.pp > 1, "under_way": Reductions()}
    spare = gather_through_gloo(module, device_mesh, path, apart=experts, **travel)
    if path is not None:
        follow_reductions(module, path, spare, copies=device_mesh.ndim > 1, apart=experts)
    if experts:
        assert mesh.expert_mesh is not None
        sharded = nn.ModuleList(module.get_submodule(name) for name in names)
        # The tokens of a whole ep group have reached them.
        divisor = mesh.layout.gradient_ranks
        spare = gather_through_gloo(sharded, mesh.expert_mesh, path, divisor=divisor, **travel)
        if path is not None:
            follow_reductions(sharded, path, spare, copies=mesh.expert_mesh.ndim > 1)
    for name in (*names, *(name for names in units for name in names), ""):
        if path is not None:
            path.follow(module.get_submodule(name), name)


def _gather_ahead(order: Sequence[Any], number: int) -> None:
    """The root and the units in the order of the model: each has the next `number` gathered while it computes.

    In the backward it is those before it. Torch's own way is one there, and in the forward what the host begins early.
    A unit that is gathered and not entered is cut again at the end of the backward, by FSDP2.
    """
    for index, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[index + 1 : index + 1 + number])
        behind = order[1:] if index == 0 else order[1:index]  # the root's backward comes first
        unit.set_modules_to_backward_prefetch(behind[-number:][::-1])


def _shard_experts(
    module: nn.Module, experts: Collection[nn.Module], mesh: Mesh, placer: Placer, how: dict[str, Any]
) -> list[str]:
    """The names of those that this rank has."""
    names, size = [], mesh.layout.expert_shards
    for name, member in module.named_modules():
        if member not in experts:
            continue
        placer.place(member)
        if any(p.is_meta for p in member.parameters()):
            continue  # other stages of a pipeline hold them
        member.register_forward_hook(_give_own_memory)
        fully_shard(member, mesh=mesh.expert_mesh, shard_placement_fn=lambda p: Shard(even_dim(p.shape, size)), **how)
        placer.forget_cut()
        names.append(name)
    return names


def even_dim(shape: Sequence[int], size: int) -> int:
    """The first dim of stacked experts that `size` ranks share evenly; the first one where none is."""
    return next((dim for dim, extent in enumerate(shape) if extent % size == 0), 0)


def _give_own_memory(module: nn.Module, arguments: Any, output: Any) -> Any:
    """A forward hook, before FSDP2's: what is a view of something else becomes a tensor of its own.

    FSDP2 notices the backward by a hook on the output, and an operation in place on a view (`output /= 2` in `loss`)
    would drop that without a word: the unit's gradients would never be reduced, and nothing would be learnt.
    """
    if not torch.is_grad_enabled():
        return output
    return map_tensors(lambda t: t if t._base is None or not t.requires_grad else t.clone(), output)


def find_scalars(tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """The trainable parameters among `tensors` that have no dims, each once; () where none is cut."""
    if not mesh.layout.fully_sharded:
        return ()
    found = {id(t): t for t in tensors.values() if isinstance(t, nn.Parameter) and t.dim() == 0 and t.requires_grad}
    return tuple(t for t in found.values() if not isinstance(t, DTensor))


def reshard_all(module: nn.Module) -> None:
    """Drop gathered parameters: after a forward without backward the root's (under grad_op all) are still whole."""
    for member in module.modules():
        if isinstance(member, FSDPModule):
            member.reshard()
