"""Who each tensor is: the ParameterMap of the spread modules. Nobody else peels wrappers."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import final

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from allranks.parallel.blocks import Unit
from allranks.parallel.mesh import Mesh, axes_of
from allranks.parallel.tensor import Cut
from allranks.parameter_map import Box, Entry


@final
class LiveTensors(Mapping[str, torch.Tensor]):
    """Logical name -> the tensor as it is now.

    A parameter is what the optimizer updates: under FSDP the sharded one, also while its module holds the gathered
    one. A buffer is looked up in its module each time, because a forward may put a new tensor in its place.

    Args:
        parameters: by logical name.
        buffers: by logical name the module that owns it, and its name there.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, tuple[nn.Module, str]]) -> None:
        self._parameters = dict(parameters)
        self._buffers = dict(buffers)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._parameters:
            return self._parameters[name]
        owner, leaf = self._buffers[name]
        buffer = owner._buffers[leaf]
        assert buffer is not None, f"the forward took buffer {name} away"
        return buffer

    def place_of(self, name: str) -> tuple[nn.Module, str]:
        """The module that owns a buffer, and its name there."""
        return self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._parameters
        yield from self._buffers

    def __len__(self) -> int:
        return len(self._parameters) + len(self._buffers)


def identify(
    modules: Mapping[str, nn.Module],
    units: Mapping[str, Sequence[Unit]],
    mesh: Mesh,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    pp_ranks: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> tuple[dict[str, Entry], LiveTensors]:
    """Logical name -> Entry, and logical name -> tensor, of modules that are sharded but not yet wrapped.

    Args:
        modules: by name; a name other than "" becomes a prefix.
        units: the units of each module.
        cuts: logical name -> how a parameter was cut before it was sharded.
        pp_ranks: logical name of what some stages of a pipeline hold -> their coordinates along pp. Of the others'
            tensors this rank knows nothing.
    """
    entries: dict[str, Entry] = {}
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, tuple[nn.Module, str]] = {}
    first_name: dict[int, str] = {}
    for which, module in modules.items():
        prefix = f"{which}." if which else ""
        for name, tensor, owner in _named_tensors(module):
            logical, leaf = prefix + name, name.rpartition(".")[2]
            ranks = pp_ranks.get(logical)
            if ranks is not None and mesh.coordinate("pp") not in ranks:
                continue
            alias_of = first_name.setdefault(id(tensor), logical)
            if isinstance(tensor, nn.Parameter):
                parameters[logical] = tensor
            else:
                buffers[logical] = (owner, leaf)
            cut = cuts.get(logical)
            box, holders, placements = _place_of(tensor, mesh, cut, ranks)
            entries[logical] = Entry(
                name=logical,
                shape=tuple(tensor.shape) if cut is None else cut.shape,
                dtype=str(tensor.dtype).removeprefix("torch."),
                box=box,
                holders=holders,
                kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
                placements=placements,
                alias_of=None if alias_of == logical else alias_of,
                trainable=tensor.requires_grad,
                unit=_unit_of(name, units.get(which, ())),
                stage=0 if ranks is None else min(ranks),
                persistent=leaf not in owner._non_persistent_buffers_set,
            )
    return entries, LiveTensors(parameters, buffers)


def live_parameters(modules: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Logical name -> the parameter that stands there now, of modules without wrappers, whoever has put it there."""
    return {
        f"{which}.{name}" if which else name: parameter
        for which, module in modules.items()
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """(name, tensor, the module that owns it), all parameters before all buffers."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        yield name, tensor, module.get_submodule(name.rpartition(".")[0])


def _place_of(
    tensor: torch.Tensor, mesh: Mesh, cut: Cut | None, pp_ranks: frozenset[int] | None
) -> tuple[Box, tuple[int, ...], dict[str, str]]:
    box, placements = Box.whole(tuple(tensor.shape)), dict[str, str]()
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        box = Box(tuple(offset), tuple(shape))
        assert tensor.device_mesh.mesh_dim_names is not None
        named = zip(tensor.device_mesh.mesh_dim_names, tensor.placements, strict=True)
        placements = {axis: _describe(placement) for dim, placement in named for axis in axes_of(dim)}
    if cut is not None:
        offset = tuple(start + cut.offset * (dim == cut.dim) for dim, start in enumerate(box.offset))
        box, placements[cut.axis] = Box(offset, box.shape, cut.packed), f"shard({cut.dim})"
    # Ranks that differ from this one only along axes that do not cut the tensor hold the same box.
    cutting = [axis for axis, placement in placements.items() if placement != "replicate"]
    holders = mesh.peers(cutting, pp_ranks)
    return box, holders, placements


def _describe(placement: Placement) -> str:
    return f"shard({placement.dim})" if isinstance(placement, Shard) else "replicate"


def _unit_of(name: str, units: Sequence[Unit]) -> str:
    for unit in units:
        if any(name.startswith(member + ".") for member in unit):
            return "+".join(unit)
    return ""
