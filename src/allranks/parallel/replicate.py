"""Copies of the model: DistributedDataParallel over the ranks with other samples or other positions."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import TaskError
from allranks.parallel.mesh import Mesh
from allranks.parallel.replica_twin import ReplicaTwin, is_fake

REPLICAS = (DistributedDataParallel, ReplicaTwin)
"""What `replicate` puts around a module; the second where its tensors have no memory."""

# torch 2.13 renames the switch that broadcasts rank 0's buffers before each forward.
_RENAMED = "forward_sync_buffers"
_FORWARD_SYNC = _RENAMED if _RENAMED in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers"

# Of torch's message only this says which parameters a backward has not reached; it counts those that DDP reduces.
_UNREACHED = re.compile(r"indices which did not receive grad for rank \d+\s*:([\d\s]+)")
NAMED = 4
"""Parameters without gradient, of those that there are."""


def replicate(module: nn.Module, mesh: Mesh, device: torch.device, *, find_unused: bool = False) -> nn.Module:
    """`module` under DDP on `mesh`; its values are already equal on every rank.

    Gradients become the mean over the ranks. Buffers are left alone: which of them may differ is the business of
    `batchnorm`. A module without trainable parameters (but those that DDP was told to leave alone) stays as it is.

    Args:
        find_unused: look in every backward for parameters that get no gradient. Without it the first such parameter
            holds up the bucket it lies in, and DDP raises in the step after.
    """
    alone = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    if not any(p.requires_grad and name not in alone for name, p in module.named_parameters()):
        return module
    if is_fake(module):
        return ReplicaTwin(
            module,
            mesh.gradient_group,
            bucket_mb=mesh.layout.ddp_bucket_mb,
            find_unused=find_unused,
            static_graph=mesh.layout.static_graph,
        )
    # A cap of None is torch's own: 25 MB, but 1 MB for the first bucket, so that reducing begins early.
    options: dict[str, Any] = {_FORWARD_SYNC: False, "bucket_cap_mb": mesh.layout.ddp_bucket_mb}
    # With modules on several devices DDP must not move the arguments itself.
    alone_on_gpu = device.type == "cuda" and {p.device for p in module.parameters()} == {device}
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if alone_on_gpu else None,
        process_group=mesh.gradient_group,
        init_sync=False,
        find_unused_parameters=find_unused,
        gradient_as_bucket_view=True,
        static_graph=mesh.layout.static_graph,
        **options,
    )


def forget_forward(modules: Iterable[nn.Module]) -> None:
    """The last forward was one whose backward reduces, and that never comes.

    DDP would reduce in the next one in its place, which need not be the last of its step, and by what this has reached.
    """
    for module in modules:
        if isinstance(module, DistributedDataParallel):
            module.reducer._reset_state()  # there is no public name; its buckets get their order again


def check_finished(modules: Iterable[nn.Module], trainable: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """After the last backward of a step: DDP has reduced every gradient.

    It has not where a parameter got none in it, though another micro-step may have given it one: the bucket in which
    that lies never travelled, and torch says so in the next forward, after an update with this rank's own gradients.

    Args:
        trainable: gives logical name -> parameter, where there is something to name.

    Raises:
        TaskError: it has not.
    """
    for module in modules:
        if not isinstance(module, DistributedDataParallel):
            continue
        try:
            module._check_reducer_finalized()
        except RuntimeError as error:
            raise TaskError(_say_unreached(module, trainable(), str(error))) from error


def _say_unreached(module: DistributedDataParallel, trainable: Mapping[str, torch.Tensor], said: str) -> str:
    names = {id(tensor): name for name, tensor in trainable.items()}
    alone = module.parameters_to_ignore
    reduced = [p for name, p in module.module.named_parameters() if p.requires_grad and name not in alone]
    told = _UNREACHED.search(said)
    found = [reduced[int(at)] for at in told[1].split()] if told else [p for p in reduced if p.grad is None]
    unreached = [names[id(p)] for p in found if id(p) in names]
    which = ", ".join(unreached[:NAMED]) + (f" and {len(unreached) - NAMED} more" if len(unreached) > NAMED else "")
    return (
        f"{which or 'a parameter'} got no gradient in the last backward of a step, so DDP has not reduced others "
        "either, and nothing was updated: name such modules in hints().optional (or say world.parallelize(model, "
        "find_unused=True)), or freeze what is never used"
    )
