"""What `parallelize` returns: the user's modules, spread over the mesh, and who each of their tensors is."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from allranks.parallel.average import average_gradients, take_from_first
from allranks.parallel.balance import Balances
from allranks.parallel.batchnorm import BatchNorms
from allranks.parallel.context import Context
from allranks.parallel.ddp_hook import DdpHook
from allranks.parallel.expert import ExpertGradients
from allranks.parallel.held_back import check_released, find_held_back, forget_held_back, take_held_back
from allranks.parallel.identity import LiveTensors
from allranks.parallel.mesh import Mesh
from allranks.parallel.norm import Groups, clip_gradients
from allranks.parallel.optimizer_shard import RowShards
from allranks.parallel.path import Path
from allranks.parallel.placement import Placement
from allranks.parallel.precision import Precision
from allranks.parallel.replicate import REPLICAS, check_finished, forget_forward, replicate
from allranks.parallel.shard import reshard_all
from allranks.parallel.stages import Stages
from allranks.parallel.whole import shake, shake_part
from allranks.parameter_map import Entry, ParameterMap
from allranks.verdict import Decision

UNCUT = "replicate"


def is_gpu(device: torch.device) -> bool:
    """Whether it is no processor: what runs may not run on one, and sums may come out in another order each time."""
    return device.type != "cpu"


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
        cut_over: id of a parameter -> the groups over which it was cut before it was sharded.
        stages: of a pipeline, this rank's and what it shares with the others.
        row_shards: what this rank updates of each parameter, where the optimizer alone is sharded.
        batch_norms: what takes its statistics over several ranks.
        balances: routers that count, and move once a step.
        experts: reduces the gradients of experts that are cut; None where none are.
        context: how sequences are cut over the cp ranks; None where they are not.
        hook: how DDP's gradients travel; None where they go whole.
        placement: which module lies on which of this process's devices; None where it has one.
        part_uses: line -> a parameter that tp has cut, which it computes with beside its module (tensor_uses.py).
    """

    modules: dict[str, nn.Module]
    mesh: Mesh
    precision: Precision
    device: torch.device
    map: ParameterMap
    tensors: LiveTensors
    decisions: tuple[Decision, ...] = ()
    find_unused: bool = False
    path: Path = field(default_factory=Path)
    cut_over: Groups = field(default_factory=dict)
    batch_norms: BatchNorms = field(default_factory=BatchNorms)
    stages: Stages | None = None
    row_shards: RowShards | None = None
    balances: Balances = field(default_factory=Balances)
    experts: ExpertGradients | None = None
    context: Context | None = None
    hook: DdpHook | None = None
    placement: Placement | None = None
    part_uses: dict[str, str] = field(default_factory=dict)
    _scalars: tuple[torch.Tensor, ...] = ()
    _held_back: list[Any] = field(default_factory=list)
    _told: dict[nn.Module, tuple[bool, bool]] = field(default_factory=dict)

    @property
    def divisor(self) -> int:
        """What DDP and FSDP2 divide a gradient's sum by: the number of ranks with other samples or other positions."""
        return self.mesh.layout.gradient_ranks

    def trainable(self, which: str | None = None) -> dict[str, torch.Tensor]:
        """Logical name -> trainable parameter, each tied one once; of all modules, or of the one named `which`."""
        prefix = "" if which is None or which == "" else f"{which}."
        return {
            name: self.tensors[name]
            for name, entry in self.map.items()
            if entry.trainable and entry.alias_of is None and name.startswith(prefix)
        }

    def waited(self) -> dict[str, torch.Tensor]:
        """Those of `trainable` for whose gradients a wrapper waits: all but whole experts', which no token may reach.

        A rank may lack those, and another not: `ExpertGradients` reduces them.
        """
        apart = {} if self.experts is None else self.experts.parameters
        return {name: parameter for name, parameter in self.trainable().items() if id(parameter) not in apart}

    def updatable(self, which: str | None = None) -> dict[str, torch.Tensor]:
        """Logical name -> what an optimizer on this rank updates of it; otherwise as `trainable`."""
        found = self.trainable(which)
        return found if self.row_shards is None else {name: self.row_shards.rows[name] for name in found}

    def updatable_entry(self, name: str) -> Entry:
        """Who that is."""
        return self.map[name] if self.row_shards is None else self.row_shards.entries[name]

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """Logical names of all trainable parameters, those of other stages of a pipeline among them."""
        return tuple(self.trainable()) if self.stages is None else self.stages.trainable_names

    def everyone_with(self, name: str) -> tuple[int, ...]:
        """The global ranks that hold a part of a parameter or buffer."""
        return self.mesh.peers((), None if self.stages is None else self.stages.pipeline.ranks.get(name))

    def clip(
        self, parameters: Sequence[torch.Tensor], max_norm: float | None, scale: torch.Tensor | None
    ) -> torch.Tensor:
        """`clip_gradients` over the whole model; collective."""
        if self.stages is None:
            places = None if self.placement is None else self.placement.by_parameter
            return clip_gradients(parameters, max_norm, scale, self.cut_over, places=places, device=self.device)
        elsewhere = self.stages.group, self.stages.told_elsewhere
        return clip_gradients(parameters, max_norm, scale, self.cut_over, *elsewhere, device=self.device)

    def local(self, name: str) -> torch.Tensor:
        """The part of a tensor that this rank holds, detached, sharing its memory."""
        tensor = self.tensors[name].detach()
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def square_of_gradient(self, name: str) -> torch.Tensor:
        """This rank's share of the sum of squares of a parameter's gradient, 0-dim, float64; the world's add up to it.

        A part that several ranks hold is shared out among them, so that it counts once.
        """
        gradient = self.tensors[name].grad
        if gradient is None:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        return (local.double().square().sum() / len(self.map[name].holders)).to(self.device)

    @contextmanager
    def shaken(self, *, by_part: bool = False) -> Iterator[None]:
        """Inside, every floating parameter has noise on it.

        Args:
            by_part: whether the noise may depend on how a parameter is cut, so that none is drawn for the whole of it.
        """
        names = [name for name, entry in self.map.items() if entry.kind == "parameter" and entry.alias_of is None]
        kept = {name: self.local(name).clone() for name in names}
        for name in names:
            entry = self.map[name]
            place = entry.box.place(entry.shape)
            if by_part:
                shake_part(self.local(name), name, place)
            else:
                shake(self.local(name), name, entry.shape, place)
        try:
            yield
        finally:
            for name, value in kept.items():
                self.local(name).copy_(value)

    def synchronise(self, last: bool) -> None:
        """Say whether the coming forward and backward is the last before an update, whose gradients are reduced.

        What keeps its gradients sharded (full, grad_op) reduces over dp_shard each time all the same: holding whole
        gradients between micro-steps would undo the sharding. FSDP2 sums what waits for dp_replicate unit by unit, and
        loses it where the last backward reaches other parameters of the unit than the ones before: under `find_unused`
        all is reduced each time; else that is refused with a TaskError, here or in `check_reduced`.
        """
        sharded = self.mesh.layout.dp_shard > 1
        if self.stages is not None:
            last = True  # a schedule mixes forwards and backwards: each reduces what it has
        elif last and sharded and self.mesh.layout.copies > 1:
            self._held_back = find_held_back(self.modules.values())
        for module in self.modules.values():
            if isinstance(module, REPLICAS):
                module.require_backward_grad_sync = last
            elif isinstance(module, FSDPModule) and self._told.get(module) != (wanted := (last, self.find_unused)):
                # Each of these goes through all modules: not where they have been told the same before.
                module.set_requires_gradient_sync(last or sharded)
                module.set_requires_all_reduce(last or self.find_unused)
                module.set_is_last_backward(last)
                self._told[module] = wanted

    def hold_back(self) -> None:
        """Say that the coming forward and backward is a pass by itself, whose gradients are summed over dp_shard alone:
        `take_held_back` gives them.
        """
        for module in self.modules.values():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(True)
                module.set_requires_all_reduce(False)
                module.set_is_last_backward(True)
                self._told.pop(module, None)

    def take_held_back(self) -> dict[str, torch.Tensor]:
        """Logical name -> this rank's part of the gradient that such a pass has left, 1-D; once."""
        names = {id(parameter): name for name, parameter in self.trainable().items()}
        taken = take_held_back(self.modules.values())
        return {key if isinstance(key, str) else names[key]: part for key, part in taken.items()}

    def check_reduced(self) -> None:
        """After the last backward: TaskError where gradients of an earlier micro-step were lost, or not reduced."""
        check_released(self._held_back)
        if self.mesh.layout.replicated:
            check_finished(self.modules.values(), self.trainable)

    def forget_gradients(self, *, halfway: bool) -> None:
        """Drop what the micro-steps of a step that is not made have left.

        Args:
            halfway: whether the forward of the last one may have been made, without its backward.
        """
        if halfway:
            forget_forward(self.modules.values())
        for parameter in self.trainable().values():
            parameter.grad = None
        forget_held_back(self.modules.values())

    def reduce_scalars(self) -> None:
        """Average the gradients of what DDP and FSDP2 leave alone over the ranks; collective.

        Those are parameters without dims, which FSDP2 cannot cut, and experts that are cut over ep.
        """
        if self.experts is not None:
            self.experts.reduce()
        if self._scalars:
            average_gradients(self._scalars, [self.mesh.group(axis) for axis in self.mesh.gradient_axes], self.divisor)
        if self.stages is None:
            self.align_copies()

    def align_copies(self) -> None:
        """Give every tp rank the first one's gradients of what tp leaves whole; collective along tp.

        Each has computed them by itself, and they are the same but for the order of sums: on a GPU attention's backward
        adds with atomics, and the rings of two data-parallel groups go round in other orders. Copies would drift apart.
        A processor adds in one order.
        """
        if self.mesh.layout.tp > 1 and is_gpu(self.device):
            names = self.trainable().items()
            whole = [tensor for name, tensor in names if self.map[name].placements.get("tp", UNCUT) == UNCUT]
            take_from_first(whole, self.mesh.group("tp"))

    def reduce_replicated(self) -> None:
        """Average the gradients of copies that no DDP keeps equal, since a pipeline is not one forward; collective."""
        if self.stages is not None and self.mesh.layout.replicated:
            average_gradients(list(self.waited().values()), [self.mesh.gradient_group], self.divisor)

    def expect_unused(self) -> None:
        """From now on a parameter without a gradient holds up no other: DDP is built anew, HSDP reduces each time."""
        self.find_unused = True
        for which, module in self.modules.items():
            if isinstance(module, REPLICAS):
                self.modules[which] = again = replicate(module.module, self.mesh, self.device, find_unused=True)
                if self.hook is not None:
                    self.hook.attach(again)

    def bare(self, which: str = "") -> nn.Module:
        """The module without DDP or DataParallel around it: for a forward whose backward may never come."""
        module = self.modules[which]
        return module.module if isinstance(module, (*REPLICAS, nn.DataParallel)) else module

    def reshard(self) -> None:
        """Drop what a forward without backward left gathered."""
        for module in self.modules.values():
            reshard_all(module)
