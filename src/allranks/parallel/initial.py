"""Initial values: those of the user's `model()` under the seed on one process, whatever the Layout (law 5).

One process of a host (the leader) builds the model for real, the others on the meta device, where nothing is
allocated. Values then travel tensor by tensor, as bytes: a rank that is no leader holds its own part and the unit in
flight, no more.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from allranks.errors import TaskError
from allranks.parallel.gather import gather_rows
from allranks.parallel.marks import move_hooks
from allranks.parallel.placement import Placement
from allranks.verdict import Decision

Build = Callable[[], "nn.Module | Mapping[str, nn.Module]"]

IN_FULL = "model() is built in full on every rank"
CUTS_INTEGERS = torch.__version__ >= "2.13.0a0"
"""Whether FSDP2 takes a parameter of integers (torch 2.11 would have gradients of it, and stops)."""


@dataclass(frozen=True)
class Source:
    """Where initial values come from.

    Attributes:
        group: the ranks among which they are streamed; None for one process.
        leader: the global rank that has them.
        leads: whether that is this rank.
    """

    group: dist.ProcessGroup | None = None
    leader: int = 0
    leads: bool = True


def build_modules(
    build: Build, source: Source, seed: Callable[[], None]
) -> tuple[dict[str, nn.Module], list[Decision]]:
    """The user's modules by name ("" for a single one): real on the leader, on the meta device elsewhere.

    A `model()` that cannot be built on the meta device (it reads a value while it builds) is built for real on every
    rank, said so.
    """
    decisions: list[Decision] = []
    seed()
    if source.leads:
        return _by_name(build()), decisions
    try:
        with torch.device("meta"):
            modules = _by_name(build())
        stray = _find_stray(modules)
        if stray is None:
            return modules, decisions
        because = f"{stray} is a tensor and neither parameter nor buffer, so that nobody else brings its values"
    except Exception as error:
        # Whatever the user's code raised on meta tensors; where it is a real fault, the real build raises it again.
        because = f"building it without memory raised {type(error).__name__}: {error}"
    decisions.append(Decision(IN_FULL, because))
    seed()
    return _by_name(build()), decisions


def hear_of_full_builds(decisions: list[Decision], source: Source, device: torch.device) -> None:
    """Let the leader, whose decisions are printed and kept, say what only the others have met; collective."""
    mine = "".join(f"{one.because}\0" for one in decisions if one.what == IN_FULL).encode()
    told = gather_rows(torch.tensor(list(mine), dtype=torch.uint8, device=device), source.group)
    if len(told) and source.leads:
        decisions.append(Decision(IN_FULL, bytes(told.tolist()).decode().partition("\0")[0]))


def check_same_structure(modules: Mapping[str, nn.Module], source: Source, device: torch.device) -> None:
    """TaskError where this rank's model() made other tensors than the leader's; collective."""
    if source.group is None:
        return
    mine = zlib.crc32("\n".join(_describe_structure(modules)).encode())
    theirs = torch.tensor([mine], dtype=torch.int64, device=device)
    dist.broadcast(theirs, source.leader, group=source.group)
    differs = torch.tensor([int(theirs.item() != mine)], dtype=torch.int64, device=device)
    dist.all_reduce(differs, group=source.group)
    if differs.item():
        raise TaskError(
            f"model() built other parameters on {int(differs.item())} rank(s) than on rank {source.leader}: "
            "make it a function of the task's settings alone"
        )


@final
@dataclass
class Placer:
    """Gives every tensor of a module its place on `device` and the leader's value, each shared tensor once.

    Attributes:
        contiguous: whether to give up other orders in memory (channels_last), which FSDP2 does not cut.
        cut: (a parameter as it was built, the same with its value on the device) -> the part that this rank keeps.
        absent: whether this rank keeps nothing of a tensor, as it was built; it stays on the meta device then.
        apart: modules whose own parameters FSDP2 leaves as they are.
        placement: where a process has several devices, which tensor goes to which of them.
    """

    device: torch.device
    source: Source
    contiguous: bool = False
    cut: Callable[[nn.Parameter, nn.Parameter], nn.Parameter] = lambda built, placed: placed
    absent: Callable[[torch.Tensor], bool] = lambda built: False
    apart: Sequence[nn.Module] = ()
    placement: Placement | None = None
    _complete: bool = False
    # Old tensors are kept beside the new ones: an id is only unique while its object lives.
    _placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def stays(self, parameter: nn.Parameter) -> bool:
        """Whether FSDP2 leaves it as it is: it has no dims, is one that torch does not cut, or lies `apart`."""
        if not parameter.dim() or not (CUTS_INTEGERS or parameter.is_floating_point()):
            return True
        return any(parameter is own for member in self.apart for own in member._parameters.values())

    def forget_cut(self) -> None:
        """Let go of the whole parameters of a unit that has been cut: nothing outside a unit shares one.

        Buffers and parameters that FSDP2 leaves alone stay: they are not cut, and other units may share them.
        """
        pairs = self._placed.items()
        self._placed = {
            key: pair for key, pair in pairs if not isinstance(pair[1], nn.Parameter) or self.stays(pair[1])
        }

    def place_all(self, modules: Iterable[nn.Module]) -> None:
        """Place everything, in one order on all ranks, where they do not all cut the same units afterwards."""
        for module in modules:
            self.place(module)
        self._complete = True

    def place(self, module: nn.Module) -> None:
        """Place the tensors of `module` and of everything below it that have no place yet; collective."""
        if self._complete:
            return
        for owner, name, tensor in list(_owned_tensors(module)):
            _, placed = self._placed.get(id(tensor), (tensor, None))
            if placed is None:
                placed = self._stream(tensor)
                if self.absent(tensor):
                    placed = _without_memory(placed)
                elif isinstance(tensor, nn.Parameter) and isinstance(placed, nn.Parameter):
                    placed = self.cut(tensor, placed)
                self._placed[id(tensor)] = (tensor, placed)
                self._placed[id(placed)] = (placed, placed)
            if isinstance(placed, nn.Parameter) and type(owner).__setattr__ is nn.Module.__setattr__:
                owner._parameters[name] = placed
            elif isinstance(placed, nn.Parameter):
                setattr(owner, name, placed)  # nn.LSTM and its like hold their weights in a list besides
            else:
                owner._buffers[name] = placed

    def _stream(self, tensor: torch.Tensor) -> torch.Tensor:
        placed = self._allocate(tensor)
        if self.source.group is not None and placed.numel() > 0:
            data = placed.detach()
            wire = data if data.is_contiguous() else data.contiguous()
            # As bytes: every dtype travels, and nothing is rounded.
            dist.broadcast(wire.reshape(-1).view(torch.uint8), self.source.leader, group=self.source.group)
            if wire is not data:
                data.copy_(wire)
        return placed

    def _allocate(self, tensor: torch.Tensor) -> torch.Tensor:
        # Elements that share memory (expanded buffers) could not be written to later, by a restore for one.
        reorder = _overlaps_itself(tensor) or (self.contiguous and not tensor.is_contiguous())
        device = self.device if self.placement is None else self.placement.device_of(tensor)
        if tensor.device == device and not reorder:
            return tensor
        if tensor.is_meta:
            order = torch.contiguous_format if reorder else torch.preserve_format
            data = torch.empty_like(tensor, device=device, memory_format=order)
        else:
            data = (tensor.detach().contiguous() if reorder else tensor.detach()).to(device)
        if not isinstance(tensor, nn.Parameter):
            return data
        parameter = nn.Parameter(data, requires_grad=tensor.requires_grad)
        move_hooks(tensor, parameter)
        return parameter


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    data = torch.empty_like(tensor, device="meta")
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


def _by_name(built: object) -> dict[str, nn.Module]:
    if isinstance(built, nn.Module):
        return {"": built}
    if not isinstance(built, Mapping) or not built or not all(isinstance(part, nn.Module) for part in built.values()):
        raise TaskError(f"model() returned {type(built).__name__}: return an nn.Module, or a dict of them by name")
    if unfit := [name for name in built if not isinstance(name, str) or not name or "." in name]:
        raise TaskError(f"model() names a module {unfit[0]!r}: a name is a word without dots")
    return dict(built)


def _find_stray(modules: Mapping[str, nn.Module]) -> str | None:
    """An attribute of a module or of a parameter that holds a tensor without memory, also in a list, tuple or dict."""
    for which, module in modules.items():
        parameters = module.named_parameters(prefix=which)
        # What a tensor of another class holds in attributes is what it consists of.
        plain = ((name, one) for name, one in parameters if issubclass(type(one), nn.Parameter))
        for name, owner in (*module.named_modules(prefix=which), *plain):
            for attribute, value in vars(owner).items():
                if attribute not in ("_parameters", "_buffers", "_modules") and any(
                    isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value)
                ):
                    return f"{name}.{attribute}" if name else attribute
    return None


def _describe_structure(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    for which, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield f"{which}.{name}:{tuple(parameter.shape)}:{parameter.dtype}:{parameter.requires_grad}"
        for name, buffer in module.named_buffers(remove_duplicate=False):
            yield f"{which}.{name}:{tuple(buffer.shape)}:{buffer.dtype}"


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True))


def _owned_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            # A DTensor belongs to a unit that has been placed and cut already.
            if parameter is not None and not isinstance(parameter, DTensor):
                yield owner, name, parameter
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer
