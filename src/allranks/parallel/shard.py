"""The dp_shard axis: FSDP2 (`torch.distributed.fsdp.fully_shard`) unit by unit."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from allranks.parallel.blocks import Unit
from allranks.parallel.gloo_ops import gather_through_gloo
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
) -> None:
    """Shard `module` in place over `mesh`, each unit placed and filled just before it is cut; collective.

    Args:
        units: tuples of module names that are gathered together; what is in none is the root's.
        policy: in which type a unit is gathered.
        placer: gives each unit its values; after the cut only this rank's part stays.
        path: notes which units the forwards enter and the backwards reduce.
        offload: where the shards wait; by default on the device.

    Parameters without dims cannot be cut, and experts are cut over ep: they stay as they are, and `reduce_scalars`
    reduces their gradients.
    Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """
    device_mesh = mesh.shard_mesh
    # None is torch's own choice for full sharding: every unit but the root, whose parameters the backward needs first.
    reshard = None if mesh.layout.sharding == "full" else False
    parts = [[module.get_submodule(name) for name in names] for names in units]
    for part in (*parts, [module]):
        for member in part:
            placer.place(member)
            member.register_forward_hook(_give_own_memory)
        # Nor is cut what other stages of a pipeline hold.
        alone = {p for member in part for p in member.parameters() if placer.stays(p) or p.is_meta}
        target = part if len(part) > 1 else part[0]
        how: Any = {"mp_policy": policy, "offload_policy": offload or OffloadPolicy(), "ignored_params": alone}
        fully_shard(target, mesh=device_mesh, reshard_after_forward=reshard, **how)
        placer.forget_cut()
    # Who recomputes blocks wants memory rather than time.
    overlap, staged = mesh.layout.recompute != "full", mesh.layout.pp > 1
    spare = gather_through_gloo(module, device_mesh, path, overlap=overlap, staged=staged)
    if path is not None:
        follow_reductions(module, path, spare, copies=device_mesh.ndim > 1)
    for name in (*(name for names in units for name in names), ""):
        if path is not None:
            path.follow(module.get_submodule(name), name)


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
