"""One step of a model, operation by operation: what ran where, what it read, and what it left for the backward.

A dispatch mode sees every kernel below autograd, on fake tensors and on real ones alike; hooks around modules say whose
it is; torch's saved-tensor hooks say what the backward keeps. Memory is counted by storage: views of one storage are
one, a parameter is no activation, and neither is what was computed from parameters alone (a copy in a lower precision).
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from allranks.profiling.fakes import run_kernel
from allranks.profiling.kernels import count_flops, is_causal, kind_of, name_of, shape_of
from allranks.profiling.recording import GIVEN, Call, Memory, Read, Recording


@final
class Recorder(TorchDispatchMode):
    """Records what runs inside `recording()`.

    Args:
        modules: the user's, by name ("" for a single one).
        parameters: logical name -> parameter.
        buffers: what the modules hold besides: read like activations, and never counted as kept.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, torch.Tensor],
        buffers: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording_now = Recording()
        self._names = {
            id(member): name for which, module in modules.items() for name, member in module.named_modules(prefix=which)
        }
        self._parameters = dict(parameters)
        self._stack: list[str] = []
        self._known: dict[int, Memory] = {}
        self._pending: list[Memory] = []
        self._serial = 0
        for name, parameter in parameters.items():
            memory = self._memory(parameter, GIVEN)
            memory.parameters = tuple(sorted({*memory.parameters, name}))
        for buffer in buffers:
            memory = self._memory(buffer, GIVEN)
            memory.counted = memory.is_buffer = True

    @property
    def running(self) -> str:
        """The innermost module that was running last, for what is said of an error."""
        return self._stack[-1] if self._stack else ""

    @property
    def _last(self) -> int:
        return len(self.recording_now.calls) - 1

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record what runs inside; the Recording is whole at the end."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=False)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved), self:
                yield self.recording_now
        finally:
            before.remove()
            after.remove()
        self._count_pending()
        self._forget_gradients()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if func.namespace == "prim":
                return func(*args, **kwargs)
            with self:
                parts = func.decompose(*args, **kwargs)  # whole only in inference mode
            if parts is not NotImplemented:
                return parts
        read = [self._memory(t, GIVEN) for t in _tensors((args, kwargs))]
        found = run_kernel(func, args, kwargs)
        outputs = _tensors(found)
        old = {memory.serial for memory in read}
        index = len(self.recording_now.calls)
        written = [self._memory(t, index) for t in outputs]
        new = [m for m in written if m.serial not in old]
        changes = isinstance(func, OpOverload) and func._schema.is_mutable
        if not new and not changes:
            return found  # a view
        self._record(func, args, kwargs, found, read)
        only_parameters = bool(read) and all(memory.parameters for memory in read)
        names = tuple(sorted({name for memory in read for name in memory.parameters}))
        for memory in new:
            memory.parameters = names if only_parameters else ()
            self.recording_now.events.append((memory.serial, memory.num_bytes, index))
        if changes:
            for memory in written:
                memory.producer = index
        return found

    def _record(self, func: Any, args: Any, kwargs: Any, found: Any, read: list[Memory]) -> None:
        name = name_of(func)
        tensors = list(zip(_tensors((args, kwargs)), read, strict=True))
        moved = sum(_view_bytes(t) for t, memory in tensors if not memory.parameters)
        made = sum(_view_bytes(t) for t in _tensors(found))
        makes_nothing = name.startswith(("empty", "new_empty"))
        call = Call(
            op=name,
            modules=tuple(self._stack),
            backward=_in_backward(),
            kind=kind_of(name),
            flops=count_flops(func, args, kwargs, found),
            shape=shape_of(name, args, found),
            inputs=tuple(
                Read(memory.serial, memory.producer, _view_bytes(t), t.requires_grad, memory.is_buffer)
                for t, memory in tensors
                if not memory.parameters
            ),
            moved_bytes=0 if makes_nothing else moved + made,
            output_bytes=made,
            parameters=tuple(sorted({parameter for memory in read for parameter in memory.parameters})),
            from_parameters=bool(read) and all(memory.parameters for memory in read),
            causal=is_causal(func, args, kwargs),
        )
        self.recording_now.calls.append(call)
        if not call.from_parameters:
            self._count_pending()

    def _pack(self, saved: torch.Tensor) -> torch.Tensor:
        memory = self._memory(saved, GIVEN)
        if memory.counted:
            return saved
        memory.counted = True
        if memory.parameters:
            is_copy = memory.producer != GIVEN
            self.recording_now.weight_copy_bytes += memory.num_bytes * is_copy
        elif _in_backward() or (memory.producer == self._last >= 0 and not saved.requires_grad):
            self._count(memory)  # autograd detaches what a kernel has made, before it saves it
        else:
            self._pending.append(memory)  # an input is saved before its kernel runs
        return saved

    def _count_pending(self) -> None:
        for memory in self._pending:
            self._count(memory)
        self._pending.clear()

    def _count(self, memory: Memory) -> None:
        if self.recording_now.calls:
            self.recording_now.calls[-1].saved_bytes += memory.num_bytes
            self.recording_now.calls[-1].given_bytes += memory.num_bytes * (not memory.made)

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._stack.append(self._names.get(id(module), self.running))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._count_pending()
        self._stack.pop()

    def _memory(self, tensor: torch.Tensor, producer: int) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            return known
        self._serial += 1
        serial, made = self._serial, producer != GIVEN
        memory = Memory(serial, storage.nbytes(), producer, made=made)

        def forget(_: object) -> None:
            # Another storage may have its place by now.
            if key in self._known and self._known[key].serial == serial:
                del self._known[key]
            if made:
                self.recording_now.events.append((serial, -memory.num_bytes, self._last))

        memory.alive = weakref.ref(storage, forget)
        self._known[key] = memory
        return memory

    def _forget_gradients(self) -> None:
        """Take out of the events what belongs to parameters: their gradients, and what was computed from them alone."""
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        apart = {self._memory(grad, GIVEN).serial for grad in grads}
        apart |= {memory.serial for memory in self._known.values() if memory.parameters}
        self.recording_now.events = [event for event in self.recording_now.events if event[0] not in apart]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _view_bytes(tensor: torch.Tensor) -> int:
    """What a kernel moves of it: an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
