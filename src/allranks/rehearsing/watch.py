"""Sees every operation of a rehearsed step below autograd: its memory, its messages, its FLOPs, and what it reads.

What the engine itself reads of tensors (a norm, an agreement, whether float16 leaves a step out) has an answer with
which the step is one that counts; what the user's code reads has none, and ends the rehearsal with the line.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from allranks.losses import ChunkedHead
from allranks.parallel.functional_calls import NAMESPACE, Call, stands_for
from allranks.parallel.seen_collectives import DEVICE_OF, collective_name, moved_bytes
from allranks.parallel.spread import Spread
from allranks.profiling.fakes import needs_values, run_kernel
from allranks.profiling.kernels import count_flops
from allranks.rehearsal import Category
from allranks.rehearsed_messages import Message
from allranks.rehearsing.groups import GroupNames
from allranks.rehearsing.kernels import Kernels
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.places import (
    LOSS,
    UPDATE,
    Places,
    answer_to_engine,
    is_users,
    line_that_asked,
    puts_back,
    starred,
    waits_for_peer,
)
from allranks.rehearsing.terms import EXCHANGES, even_bytes, peer_of, terms_of, waits_of

REDUCER = "DDP's reducer (torch.distributed.ddp.reducer)"
"""What asks for buckets where training runs, by the name that it has in a profile; here its twin does."""


@final
class Watch(TorchDispatchMode):
    """Looks on inside, where `mode` makes the tensors.

    Args:
        ignored: groups whose collectives are no part of the model's step (the agreement's).
        on_cuda: whether the processor's tensors stand for a GPU's.

    Attributes:
        lacked: (what the user's code was told first where it asked for values, the module), even if it has caught it.
    """

    def __init__(
        self,
        spread: Spread,
        mode: FakeTensorMode,
        ledger: Ledger,
        ignored: Sequence[dist.ProcessGroup | None] = (),
        *,
        on_cuda: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lacked: tuple[Exception, str] | None = None
        self._mode = mode
        self._ledger = ledger
        self._on_cuda = on_cuda
        self._kernels = Kernels(on_cuda=on_cuda)
        self._names = GroupNames(spread.mesh)
        self._ignored = {group.group_name for group in ignored if group is not None}
        modules = {which: spread.bare(which) for which in spread.modules}
        self.places = Places(modules)
        # Buffers as they are before the first step; what is written to, or put in one's place, is not among them.
        buffers = (buffer for module in modules.values() for buffer in module.buffers() if not buffer.is_meta)
        self._untouched = {_key(buffer): ledger.find(buffer) for buffer in buffers}
        self._chunked = {
            name
            for which, module in modules.items()
            for name, member in module.named_modules(prefix=which)
            if isinstance(member, ChunkedHead)
        }
        self._has_loss = spread.stages is None or spread.stages.pipeline.last in spread.stages.pipeline.stages

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look on, follow forwards, and see storages that are resized."""
        with ExitStack() as stack:
            stack.enter_context(self.places.following())
            stack.enter_context(self._ledger.watching_sizes())
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].device  # half of all that comes here
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # a DTensor, or one in eight bits with its scale: what it does within is seen
        if active_fake_mode() is not self._mode:
            return func(*args, **kwargs)
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            answer = answer_to_engine()
            if answer is not None:
                return answer if args[0].dtype.is_floating_point else int(answer)
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if name == "aten::equal" and answer_to_engine() is not None:
            # The guard asks whether the first step has left a buffer as it was.
            return self._untouched.get(_key(args[0])) is self._ledger.find(args[0])
        if name.startswith("c10d::") and boxed is not None:
            group = dist.ProcessGroup.unbox(boxed)
            short = name.removeprefix("c10d::")
            waits = waits_for_peer() if short in EXCHANGES else waits_of(func, args)
            self._tell(Call(short, group, args), waits=waits)
        self._kernels.check(name, func, args, kwargs)
        try:
            found = run_kernel(func, tuple(args), kwargs)
        except Exception as error:
            if self.lacked is None and needs_values(error) and is_users(line_that_asked()):
                self.lacked = error, self.places.running
            raise
        for call in stands_for(name, args, found) if name.startswith(NAMESPACE) else ():
            self._tell(call, waits=call.name not in EXCHANGES)  # whoever looks at what it returns does
        self._note(name, func, args, kwargs, found)
        return found

    def _note(self, name: str, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        ledger = self._ledger
        leaves = (leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, FakeTensor))
        outputs = [leaf for leaf in leaves if leaf.fake_device.type != "meta"]  # is_meta asks through all modes
        if outputs:
            ledger.module, category = self._whose()
            inputs = _tensors(args, kwargs) if ledger.uses_host else ()
            for tensor in outputs:
                stored = ledger.find(tensor, inputs, category)
                if self.places.accumulates_parameter and stored.category in (None, "logits"):
                    stored.category = "gradients"  # made as part of a backward, and taken as it is
        if self._untouched:
            written = [key for key in map(_key, written_by(name, func, args, kwargs)) if key in self._untouched]
            for key in [] if written and puts_back() else written:
                self._untouched.pop(key, None)  # one operation may write to two views of a buffer
        now = ledger.now
        if now is not None:
            now.flops += count_flops(func, args, kwargs, found)

    def _whose(self) -> tuple[str, Category | None]:
        """(Module, category) of what is made now; None where only others know."""
        now = self._ledger.now
        if now is not None and now.phase == "update":
            return UPDATE, "optimizer"
        module = self.places.running
        if module == LOSS and not self._has_loss:
            return "", None
        of_loss = now is not None and (module == LOSS or module in self._chunked)
        return module, "logits" if of_loss else None

    def _tell(self, call: Call, *, waits: bool) -> None:
        now, (short, group, args) = self._ledger.now, call
        if now is None or group.group_name in self._ignored:
            return
        num_bytes = 0 if short == "barrier" else moved_bytes(short, group, args)
        line = line_that_asked()
        once, uneven = "parallel/replica_twin.py" in line, "parallel/gather.py" in line
        own = short in EXCHANGES and is_users(line)
        line = REDUCER if once else line
        module = self.places.running
        if torch._C._current_graph_task_id() != -1:
            asked = "" if once or own else self.places.called_by(module)  # a bucket is no single module's
            line = ", ".join(filter(None, (f"backward of {starred(module) or 'the model'}", asked or line)))
        axis, members = self._names.axis(group), self._names.members(group)
        # The user's: one rank's with another one.
        alone = own or (short in EXCHANGES and (axis not in ("pp", "cp") or bool(self._names.only(group))))
        only = (dist.get_rank(),) if alone else self._names.only(group)
        across = () if short in EXCHANGES else self._names.across(group)
        peer = peer_of(short, group, args) if short in EXCHANGES else None
        tag = int(args[-1]) if own and not self._on_cuda else 0
        alike = terms_of(short, args), even_bytes(short, args), only, across, waits, peer, tag, own
        where = now.flops, self._ledger.gathering
        message = Message(
            axis, collective_name(short), num_bytes, group.size(), line, once, members, uneven, *alike, *where
        )
        now.messages.append(message)


def written_by(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """The tensors that an operation writes to."""
    if name == "aten::native_batch_norm":  # says so of none, and moves its running statistics
        return _tensors(args[3:5], {}) if args[5] else ()
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    named = {told.name for told in schema.arguments if told.alias_info is not None and told.alias_info.is_write}
    placed = [value for told, value in zip(schema.arguments, args, strict=False) if told.name in named]
    return _tensors(placed, [value for name, value in kwargs.items() if name in named])


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor) and not leaf.is_meta]
