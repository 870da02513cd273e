"""What the modules of a forward are given, where fully_shard alone spreads the model, over all ranks.

No layer is cut there: ranks that are fed the same repeat each other, unless something cuts the samples on their way
(context parallelism over the same ranks). Then some module is given other values on each of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allranks.verifying.observation import rows_of


def is_sharded_over_all(modules: Mapping[str, nn.Module], size: int) -> bool:
    """Whether parameters are cut, and each of them by fully_shard over a mesh of one dim that has all `size` ranks."""
    members = [member for module in modules.values() for member in module.modules()]
    sharded = {id(p) for member in members if isinstance(member, FSDPModule) for p in member.parameters()}
    cut = [p for module in modules.values() for p in module.parameters() if isinstance(p, DTensor)]
    return bool(cut) and all(id(p) in sharded and p.device_mesh.ndim == 1 and p.device_mesh.size() == size for p in cut)


@contextmanager
def noting_given(modules: Mapping[str, nn.Module], given: list[int]) -> Iterator[None]:
    """Inside, a digest of what a module is given is added to `given` at each of its forwards, whatever its order."""

    def note(module: nn.Module, arguments: Any, options: Any) -> None:
        if torch.compiler.is_compiling():  # what is compiled is looked at from outside
            return
        tensors = [leaf for leaf in pytree.tree_leaves((arguments, options)) if type(leaf) is torch.Tensor]
        given.append(sum(rows_of(tensors)) % (1 << 64) if tensors else 0)

    members = {id(member): member for module in modules.values() for member in module.modules()}
    hooks = [member.register_forward_pre_hook(note, with_kwargs=True) for member in members.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
