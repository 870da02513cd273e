"""Offload with two memories where the machine has one: which tensor lies on the host, and what crosses.

A rehearsal's tensors are all the processor's, which stands for the device. Training's own offload runs on them; where
it asks for the host's memory, or for the device's again, that is written down with the bytes that cross.
What an operator makes lies where its inputs lie (`Ledger.find`): so the optimizer's state follows the shards.

FSDP2 moves by `Tensor.to`, which on one device moves nothing: there a copy is made in its place, as between two.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.overrides import TorchFunctionMode

from allranks.parallel import host_parameters, offload
from allranks.parallel.spread import Spread
from allranks.parallel.step_record import find_units
from allranks.rehearsing.ledger import Ledger
from allranks.rehearsing.world import replaced

What = Literal["parameters", "gradients", "activations"]
Copy = Callable[[torch.Tensor, bool], torch.Tensor]


class TwoMemories(Protocol):
    """Gives memory for what is about to be copied from the one to the other."""

    def on_host(self, tensor: torch.Tensor, what: What, *, pinned: bool) -> torch.Tensor:
        """The host's, for a copy of a tensor that lies on the device; pinned where nobody waits for the copy."""
        ...

    def on_device(self, tensor: torch.Tensor, what: What) -> torch.Tensor:
        """The device's, for a copy of a tensor that waits on the host."""
        ...


@final
class Noted:
    """Memory without bytes, written down in a ledger with every transfer."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def on_host(self, tensor: torch.Tensor, what: What, *, pinned: bool) -> torch.Tensor:
        """Pinned memory, or the system's."""
        with self._ledger.making("pinned" if pinned else "pageable"):
            made = torch.empty_like(tensor)
            self._ledger.mark(made, "gradients" if what == "gradients" else "activations")
        return self._tell(made, what, "host")

    def on_device(self, tensor: torch.Tensor, what: What) -> torch.Tensor:
        """As large as the tensor is."""
        with self._ledger.making("device"):
            made = torch.empty_like(tensor)
        return self._tell(made, what, "device")

    def _tell(self, made: torch.Tensor, what: What, to: str) -> torch.Tensor:
        if self._ledger.now is not None:
            self._ledger.now.transfers.append((what, to, made.nbytes))
        return made


@contextmanager
def beside_host(memories: TwoMemories, *, accelerator: bool) -> Iterator[None]:
    """Inside, what offload moves goes through `memories`.

    Args:
        accelerator: whether the processor stands for a device with memory of its own, so that it may be offloaded.
    """

    def move_gradient(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        return memories.on_host(tensor, "gradients", pinned=pinned).copy_(tensor)

    def move_parameter(tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        return memories.on_device(tensor, "parameters").copy_(tensor)

    def reduce_there(parameters: Sequence[FSDPParam], *args: Any, **kwargs: Any) -> Any:
        with _pinning(parameters), _Moving(move_gradient):
            return reduce(parameters, *args, **kwargs)

    def gather_from_there(own: FSDPParam) -> Any:
        with _Moving(move_parameter):
            return gather.fget(own)

    reduce, gather = vars(_fsdp_param_group)["foreach_reduce"], vars(FSDPParam)["all_gather_inputs"]
    with ExitStack() as stack:
        for owner, name, value in (
            (_fsdp_param_group, "foreach_reduce", reduce_there),
            (FSDPParam, "all_gather_inputs", property(gather_from_there)),
            (offload, "host_memory_like", lambda like, pinned: memories.on_host(like, "activations", pinned=True)),
            (offload, "device_memory_like", lambda waiting, device: memories.on_device(waiting, "activations")),
            (offload, "MOVED", (*offload.MOVED, FakeTensor)),
        ):
            stack.enter_context(replaced(owner, name, value))
        if accelerator:
            stack.enter_context(replaced(host_parameters, "has_own_memory", lambda device: True))
        yield


def mark_waiting(spread: Spread, ledger: Ledger) -> None:
    """Say which parts of parameters lie in the host's memory between steps, before anything else is said of them."""
    for which in spread.modules:
        for group, _, _ in find_units(spread.bare(which), which):
            for own in group.fsdp_params:
                if own.offload_to_cpu:
                    with ledger.making("pinned"):
                        ledger.find(own.sharded_param._local_tensor)


@contextmanager
def _pinning(parameters: Sequence[FSDPParam]) -> Iterator[None]:
    """Inside, FSDP2 takes their part of the host's memory for pinned, as beside a GPU: what it then waits for, it says.

    It copies a gradient beside the device's work only where the host does not add it to another one.
    """
    with ExitStack() as stack:
        for own in parameters:
            stack.enter_context(replaced(own, "pin_memory", own.offload_to_cpu))
        yield


@final
class _Moving(TorchFunctionMode):
    """Inside, `Tensor.to` of a device is a copy to another memory, though the device is the same.

    Args:
        copy: of a tensor, and whether nobody waits for it.
    """

    def __init__(self, copy: Copy) -> None:
        super().__init__()
        self._copy = copy

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], torch.device):
            return self._copy(args[0], bool((kwargs or {}).get("non_blocking")))
        return func(*args, **(kwargs or {}))
