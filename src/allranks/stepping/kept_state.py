"""What a forward and a loss may change besides gradients, put back after runs that count as none.

Whole models and Tasks cannot be copied: they may be huge, sharded, or hold files and threads. So what the user's own
code can reach and write is looked at once, and written back after each run: attributes, what containers hold, tensors,
objects of the user's own classes. What is too large to be copied is watched, and named where it has moved.
"""

import sys
import sysconfig
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from allranks.data.random_keys import generators_kept
from allranks.parallel.batchnorm import statistics_fixed
from allranks.stepping.evaluation_mode import evaluation_mode

MOST_BYTES = 1 << 30  # of tensors that are copied
MOST_ENTRIES = 100_000  # of containers that are copied

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, set, deque, *_MAPPINGS)
_TENSORS = (torch.Tensor, nn.Parameter)  # a subclass has a working of its own
_NUM_WATCHED = 64  # elements of a tensor that is not copied
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = frozenset(
    (
        *(Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(torch.__file__).resolve().parent,
        Path(__file__).resolve().parent.parent,
    )
)


@final
class KeptState:
    """The state of a module and a Task as it is when this is made; put back as often as wanted.

    Generators and iterators are not kept: that a run draws other numbers than the one before has to show. Nor are
    parameters that are trained, and those that FSDP gathers, in which nothing stays that a forward writes.

    Attributes:
        moved: names of what has changed and is too large to be put back.
    """

    def __init__(self, module: nn.Module, task: object | None = None) -> None:
        self.moved: set[str] = set()
        self._parts = list(module.modules())
        self._entries, self._bytes = MOST_ENTRIES, _room(module)
        self._undo: list[Callable[[], None]] = []
        # What is looked at already, or not to be: held, so that no other object gets its id.
        self._seen: dict[int, object] = {id(part): part for part in self._parts}
        self._waiting: deque[tuple[str, Any]] = deque()
        sharded = any(isinstance(part, FSDPModule) for part in self._parts)
        for name, part in module.named_modules():
            self._seen |= {id(buffer): buffer for buffer in part._buffers.values()}
            self._keep_attributes(name, part)
            for leaf, parameter in part._parameters.items():
                if sharded:
                    self._seen[id(parameter)] = parameter
                else:
                    self._waiting.append((f"{name}.{leaf}", parameter))
        if task is not None:
            self._seen[id(task)] = task
            self._keep_attributes(type(task).__name__, task)
        while self._waiting:
            self._keep(*self._waiting.popleft())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, copies stand in for buffers; afterwards everything is as it was when this was made.

        A forward may write into a buffer, put another in its place, or leave a gradient's history in it.
        """
        buffers = [dict(part._buffers) for part in self._parts]
        # one copy each: a buffer may belong to several modules
        copies = {id(b): b.detach().clone() for own in buffers for b in own.values() if b is not None}
        for part, own in zip(self._parts, buffers, strict=True):
            part._buffers.update({leaf: copies[id(b)] for leaf, b in own.items() if b is not None})
        try:
            yield
        finally:
            for part, own in zip(self._parts, buffers, strict=True):
                part._buffers.clear()
                part._buffers.update(own)
            for undo in self._undo:
                undo()

    def _keep(self, name: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if type(value) in _TENSORS:
            self._keep_tensor(name.lstrip("."), value)
        elif type(value) is numpy.ndarray:
            self._keep_array(name.lstrip("."), value)
        elif type(value) in _CONTAINERS or type(value) is tuple:
            self._keep_container(name.lstrip("."), value)
        elif isinstance(value, nn.Module):  # one that is hidden from the model in a container, or on the Task
            self._keep_attributes(name, value)
            held = {**value._parameters, **value._buffers, **value._modules}
            self._waiting += ((f"{name}.{leaf}", one) for leaf, one in held.items())
        elif _is_the_users(type(value)):
            self._keep_attributes(name, value)

    def _keep_attributes(self, name: str, owner: object) -> None:
        attributes = getattr(owner, "__dict__", None)
        if attributes is None:
            return
        before = dict(attributes)
        self._undo.append(partial(_reset, owner, before))
        own = before.keys() - _OF_EVERY_MODULE if isinstance(owner, nn.Module) else before.keys()
        self._waiting += ((f"{name}.{leaf}", before[leaf]) for leaf in own)

    def _keep_container(self, name: str, value: Any) -> None:
        if len(value) > self._entries:
            self._watch(name, partial(len, value))
            return
        self._entries -= len(value)
        if type(value) is not tuple:
            self._undo.append(partial(_refill, value, copy(value)))
        members = value.items() if type(value) in _MAPPINGS else enumerate(value)
        self._waiting += ((f"{name}[{key!r}]", one) for key, one in members if not isinstance(one, str | int | float))

    def _keep_array(self, name: str, value: numpy.ndarray[Any, Any]) -> None:
        if value.dtype.hasobject or not value.flags.writeable:
            return
        if value.nbytes > self._bytes:
            self._watch(name, partial(_some_of_array, value))
            return
        self._bytes -= value.nbytes
        self._undo.append(partial(numpy.copyto, value, value.copy()))

    def _keep_tensor(self, name: str, value: torch.Tensor) -> None:
        # What is on meta belongs to another stage of a pipeline.
        if value.requires_grad or value.is_meta or value.layout is not torch.strided or not value.numel():
            return
        data = value.detach()
        if value.nbytes > self._bytes:
            self._watch(name, partial(_some_of, value))
            return
        self._bytes -= value.nbytes
        self._undo.append(partial(_rewrite, value, data, data.clone()))

    def _watch(self, name: str, read: Callable[[], object]) -> None:
        before = read()

        def look() -> None:
            if read() != before:
                self.moved.add(name)

        self._undo.append(look)


@contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Copies of the buffers inside; afterwards buffers, attributes and what else `KeptState` keeps are as before."""
    with KeptState(module).kept():
        yield


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; modes, buffers and the global generators as before afterwards."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        with evaluation_mode((module,)), generators_kept(module), statistics_fixed(module), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _room(module: nn.Module) -> int:
    """Bytes that copies may take: on an accelerator no large part of what is free."""
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    return MOST_BYTES if device is None else min(MOST_BYTES, torch.cuda.mem_get_info(device)[0] // 4)


def _is_the_users(kind: type) -> bool:
    """Whether a class is of the user's own program, of which it is known that nobody else works on its objects."""
    if kind is SimpleNamespace:
        return True
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        return kind.__module__ == "__main__"
    return not any(place in Path(file).resolve().parents for place in _LIBRARIES)


def _reset(owner: object, before: dict[str, Any]) -> None:
    """Attributes as they were; a property that was computed for good is the same whenever it is."""
    attributes = vars(owner)
    new = attributes.keys() - before.keys()
    cached = {name: attributes[name] for name in new if isinstance(getattr(type(owner), name, None), cached_property)}
    attributes.clear()
    attributes.update(before | cached)


def _refill(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(before)
    else:
        container.update(before)


@torch.no_grad()
def _rewrite(tensor: torch.Tensor, data: torch.Tensor, before: torch.Tensor) -> None:
    """Value, memory and want of history as they were; written only where it differs, as it may be another's memory."""
    if tensor.grad_fn is not None and not tensor._is_view():
        tensor.detach_()
    if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
        tensor.data = data
    if not torch.equal(data, before):
        data.copy_(before)


def _some_of_array(value: numpy.ndarray[Any, Any]) -> bytes:
    return value.flat[:: 1 + value.size // _NUM_WATCHED].tobytes()


@torch.no_grad()
def _some_of(tensor: torch.Tensor) -> object:
    """What changes with nearly every change of a large tensor: some of its elements, without a copy of all."""
    places = torch.linspace(0, tensor.numel() - 1, _NUM_WATCHED, dtype=torch.float64).long().to(tensor.device)
    return repr(tensor[torch.unravel_index(places, tensor.shape)].tolist())  # as words, nan is like nan
