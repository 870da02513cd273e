"""Evaluation mode, entered by `eval()` and left by `train()`, as modules know it from other loops.

A module may override `train(mode)`, which `eval()` calls, too: to merge adapters into a weight and take them out again,
or to drop what it has cached. Whoever only wrote flags would tell it of one way, or of none.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.parallel.shard import reshard_all


@contextmanager
def evaluation_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """All of `modules` in evaluation mode inside; afterwards each part in its own mode, and nothing left gathered.

    Parameters are afterwards what they were, to the bit: a weight from which `train()` has taken what `eval()` had
    added is a rounded one.
    """
    modules = tuple(modules)
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        reshard_all(module)  # what is written into a gathered parameter is gone with it
    written = _Written(parameter for module in modules for parameter in module.parameters())
    try:
        with written:
            for module in modules:
                module.eval()
        yield
    finally:
        for module in modules:
            reshard_all(module)
        with written:
            _give_back(modes)
        written.put_back()


def _give_back(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Each part in its mode; `train(mode)` reaches all that are below, so that parents, which are first, come first."""
    for part, training in modes:
        if part.training != training:
            part.train(training)
    for part, training in modes:
        part.training = training  # some `train()` leave out what was set by hand


@final
class _Written(TorchDispatchMode):
    """Keeps the values of those parameters that are written into while it is entered, as they were before."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters: dict[int, list[torch.Tensor]] = {}  # several may lie in one storage, as a LSTM's on a GPU
        for parameter in parameters:
            local = _local(parameter.detach())
            if local.layout is torch.strided:
                self._parameters.setdefault(_storage(local), []).append(local)
        self._before: dict[int, list[torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(args[place] if place < len(args) else given.get(argument.name))
        return func(*args, **given)

    def put_back(self) -> None:
        """The values as they were."""
        for storage, values in self._before.items():
            for parameter, value in zip(self._parameters[storage], values, strict=True):
                parameter.data.copy_(value)

    def _keep(self, written: object) -> None:
        for tensor in pytree.tree_leaves(written):
            local = _local(tensor) if isinstance(tensor, torch.Tensor) else None
            if local is None or local.layout is not torch.strided:
                continue
            storage = _storage(local)
            if storage in self._parameters and storage not in self._before:
                self._before[storage] = [parameter.clone() for parameter in self._parameters[storage]]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storage(tensor: torch.Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found
