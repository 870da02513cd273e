"""The one code path that applies a Layout to the user's modules (law 10)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from allranks.errors import LayoutError, TaskError
from allranks.parallel.block_modes import change_blocks, changes_blocks
from allranks.parallel.blocks import Unit, find_blocks, group_units
from allranks.parallel.held_back import check_released, find_held_back
from allranks.parallel.identity import identify
from allranks.parallel.initial import Build, Placer, Source, build_modules, check_same_structure
from allranks.parallel.mesh import DATA_AXES, Mesh
from allranks.parallel.path import Path
from allranks.parallel.precision import Precision
from allranks.parallel.replicate import replicate
from allranks.parallel.shard import reshard_all, shard
from allranks.parameter_map import ParameterMap
from allranks.verdict import Decision

# torch has no public name for the common base of BatchNorm1d, 2d, 3d and SyncBatchNorm.
BATCH_STATISTICS = nn.modules.batchnorm._BatchNorm


@dataclass(eq=False)
class Spread:
    """The user's modules, spread over the mesh.

    Attributes:
        modules: what is called, by name ("" for a single module).
        mesh: where they are spread.
        precision: how their forward runs.
        device: where this rank's part lies.
        map: who each parameter and buffer is.
        tensors: logical name -> the live parameter or buffer; a sharded one is a DTensor.
        decisions: what was chosen, with because.
        find_unused: whether a backward may leave parameters without gradient that others of the same step reach.
        path: the units that forwards have entered, where they are sharded.
    """

    modules: dict[str, nn.Module]
    mesh: Mesh
    precision: Precision
    device: torch.device
    map: ParameterMap
    tensors: Mapping[str, torch.Tensor]
    decisions: tuple[Decision, ...] = ()
    find_unused: bool = False
    path: Path = field(default_factory=Path)
    _scalars: tuple[torch.Tensor, ...] = ()
    _held_back: list[Any] = field(default_factory=list)

    @property
    def divisor(self) -> int:
        """What DDP and FSDP2 divide a gradient's sum by: the number of data-parallel ranks."""
        return self.mesh.dp

    def trainable(self, which: str | None = None) -> dict[str, torch.Tensor]:
        """Logical name -> trainable parameter, each tied one once; of all modules, or of the one named `which`."""
        prefix = "" if which is None or which == "" else f"{which}."
        return {
            name: self.tensors[name]
            for name, entry in self.map.items()
            if entry.trainable and entry.alias_of is None and name.startswith(prefix)
        }

    def local(self, name: str) -> torch.Tensor:
        """The part of a tensor that this rank holds, detached, sharing its memory."""
        tensor = self.tensors[name].detach()
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def synchronise(self, last: bool) -> None:
        """Say whether the coming forward and backward is the last before an update, whose gradients are reduced.

        What keeps its gradients sharded (full, grad_op) reduces over dp_shard each time all the same: holding whole
        gradients between micro-steps would undo the sharding. FSDP2 sums what waits for dp_replicate unit by unit, and
        loses it where the last backward reaches other parameters of the unit than the ones before: under `find_unused`
        all is reduced each time; else that is refused with a TaskError, here or in `check_reduced`.
        """
        sharded = self.mesh.layout.dp_shard > 1
        if last and sharded and self.mesh.layout.dp_replicate > 1:
            self._held_back = find_held_back(self.modules.values())
        for module in self.modules.values():
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = last
            elif isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(last or sharded)
                module.set_requires_all_reduce(last or self.find_unused)
                module.set_is_last_backward(last)

    def check_reduced(self) -> None:
        """After the last backward: TaskError where gradients of an earlier micro-step were lost."""
        check_released(self._held_back)

    def reduce_scalars(self) -> None:
        """Average the gradients of what FSDP2 leaves whole (parameters without dims) over the ranks; collective."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._scalars]
        if not gradients:
            return
        flat = torch.stack([gradient.reshape(()) for gradient in gradients])
        for axis in DATA_AXES:
            if getattr(self.mesh.layout, axis) > 1:
                dist.all_reduce(flat, group=self.mesh.group(axis))
        flat /= self.divisor
        for parameter, value in zip(self._scalars, flat, strict=True):
            parameter.grad = value.clone()

    def expect_unused(self) -> None:
        """From now on a parameter without a gradient holds up no other: DDP is built anew, HSDP reduces each time."""
        self.find_unused = True
        for which, module in self.modules.items():
            if isinstance(module, DistributedDataParallel):
                self.modules[which] = replicate(module.module, self.mesh, self.device, find_unused=True)

    def bare(self, which: str = "") -> nn.Module:
        """The module without DDP around it: for a forward whose backward may never come."""
        module = self.modules[which]
        return module.module if isinstance(module, DistributedDataParallel) else module

    def reshard(self) -> None:
        """Drop what a forward without backward left gathered."""
        for module in self.modules.values():
            reshard_all(module)


def parallelize(
    build: Build,
    mesh: Mesh,
    precision: Precision,
    device: torch.device,
    *,
    source: Source,
    seed: Callable[[], None],
    blocks: Sequence[str] = (),
    ddp: bool = True,
    find_unused: bool = False,
    training: bool = False,
) -> Spread:
    """Build the user's modules and spread them over `mesh`; collective.

    Args:
        build: the user's `model()`.
        source: who has the initial values.
        seed: seeds the generators, called before `build` (law 5).
        blocks: `hints().blocks`.
        ddp: whether the backward reduces the gradients of replicated modules; False where the caller does.
        find_unused: whether a backward may leave parameters without gradient (`hints().optional`).
        training: whether a model that comes in evaluation mode is put into training mode, said so.

    Raises:
        LayoutError: the modules cannot be spread in this way.
        TaskError: model() is no model, or not the same on every rank.
    """
    modules, decisions = build_modules(build, source, seed)
    for which, module in modules.items():
        if training:
            _start_training(which, module, decisions)
        _cast(module, precision, decisions)
        _check_kinds(module)
        _check_stateful(module, mesh)
    check_same_structure(modules, source, device)
    units, placer = dict[str, list[Unit]](), Placer(device, source, contiguous=mesh.layout.fully_sharded)
    path = Path()
    found = find_blocks(modules, blocks) if mesh.layout.fully_sharded or changes_blocks(mesh.layout) else {}
    decisions += change_blocks(modules, found, mesh.layout, device)
    if mesh.layout.fully_sharded:
        units = _shard_all(modules, mesh, precision, placer, found, path)
        decisions += [_describe_units(name, cut, bool(blocks)) for name, cut in units.items()]
    for module in modules.values():
        placer.place(module)
    entries, tensors = identify(modules, units, mesh)
    if mesh.layout.replicated and ddp:
        modules = {which: replicate(m, mesh, device, find_unused=find_unused) for which, m in modules.items()}
    scalars = _find_scalars(tensors) if mesh.layout.fully_sharded else ()
    return Spread(
        modules, mesh, precision, device, ParameterMap(entries), tensors, tuple(decisions), find_unused, path, scalars
    )


def has_batch_statistics(modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module's training output depends on which samples share its batch."""
    return any(_uses_batch_statistics(member) for module in modules.values() for member in module.modules())


def _uses_batch_statistics(module: nn.Module) -> bool:
    # A BatchNorm that is frozen (in evaluation mode) uses its running statistics, unless it keeps none.
    return isinstance(module, BATCH_STATISTICS) and (module.training or module.running_mean is None)


def _shard_all(
    modules: Mapping[str, nn.Module],
    mesh: Mesh,
    precision: Precision,
    placer: Placer,
    found: Mapping[str, Sequence[str]],
    path: Path,
) -> dict[str, list[Unit]]:
    _check_apart(modules, mesh)
    units = {which: group_units(module, found[which]) for which, module in modules.items()}
    for which, module in modules.items():
        shard(module, units[which], mesh, precision.fsdp_policy(), placer, path)
    return units


def _describe_units(which: str, units: Sequence[Unit], hinted: bool) -> Decision:
    model = f"model {which}" if which else "the model"
    why = "hints().blocks names them" if hinted else "these modules repeat"
    if not units:
        return Decision(f"{model} is gathered as one unit", "no block stands apart from the rest")
    some = ", ".join("+".join(unit) for unit in units[:3]) + " ..." * (len(units) > 3)
    return Decision(f"{len(units)} units and the root of {model} are gathered one at a time", f"{why}: {some}")


def _start_training(which: str, module: nn.Module, decisions: list[Decision]) -> None:
    """Only the whole: a part in evaluation mode inside a model in training mode is meant so, a frozen BatchNorm say."""
    if not module.training and any(p.requires_grad for p in module.parameters()):
        module.train()
        name = f"model {which}" if which else "the model"
        decisions.append(Decision(f"{name} is trained in training mode", "model() returned it in evaluation mode"))


def _cast(module: nn.Module, precision: Precision, decisions: list[Decision]) -> None:
    """Floating tensors (complex ones stay) in the precision's own type, said where the model came in another."""
    floating = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if floating <= {precision.parameters}:
        return
    if precision.parameters is torch.float64:
        module.double()
        return
    module.float()
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floating - {precision.parameters}))
    because = f"train.precision={precision.name}; model() made them {names}"
    decisions.append(Decision("parameters are float32", because))


def _check_kinds(module: nn.Module) -> None:
    """Only dense, real gradients can be reduced, clipped and cut alike."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            kind = str(parameter.dtype).removeprefix("torch.")
            raise TaskError(f"parameter {name} is {kind}: make it real, and use torch.view_as_complex in forward")
    for name, member in module.named_modules():
        if isinstance(member, nn.Embedding | nn.EmbeddingBag) and member.sparse and member.weight.requires_grad:
            raise TaskError(
                f"{name or 'the model'} has sparse gradients, which come with a later version: sparse=False"
            )


def _check_stateful(module: nn.Module, mesh: Mesh) -> None:
    names = [name or "the model" for name, member in module.named_modules() if _uses_batch_statistics(member)]
    if mesh.dp > 1 and names:
        raise LayoutError(
            f"{names[0]} (BatchNorm, {len(names)} in all) sees only its own rank's samples over {mesh.dp} "
            "data-parallel ranks: synchronised statistics come with a later version; use --layout single, or GroupNorm"
        )


def _check_apart(modules: Mapping[str, nn.Module], mesh: Mesh) -> None:
    """Each module is cut by itself: a parameter that two of them share would silently become two."""
    owner: dict[int, str] = {}
    for which, module in modules.items():
        for name, parameter in module.named_parameters():
            other = owner.setdefault(id(parameter), which)
            if other != which:
                raise LayoutError(
                    f"{which}.{name} is shared with model {other!r}, and layout {mesh.layout} cuts each model by "
                    "itself: use --layout ddp or single"
                )


def _find_scalars(tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    found = {id(t): t for t in tensors.values() if isinstance(t, nn.Parameter) and t.dim() == 0 and t.requires_grad}
    return tuple(t for t in found.values() if not isinstance(t, DTensor))
