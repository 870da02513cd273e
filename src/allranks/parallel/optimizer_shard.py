"""sharding=optimizer: each rank updates its rows of every parameter, and keeps the optimizer's state for these alone.

Parameters and gradients are whole on every rank (DDP); after the update the rows are gathered again. Source: ZeRO
(arXiv 1910.02054), its first stage. Rows instead of whole parameters, so that every rank has the same share whatever
the sizes; exact for optimizers that treat each element by itself, as SGD and Adam do.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import nn

from allranks.parallel.mesh import Mesh
from allranks.parallel.tensor_ops import gather_parts, part_bounds
from allranks.parameter_map import Entry

BUCKET_BYTES = 25 * 1024 * 1024  # gathered at once: DDP's own size


@final
class RowShards:
    """This rank's rows of every trainable parameter, as tensors that share the parameters' memory.

    Args:
        parameters: logical name -> whole parameter.
        entries: logical name -> who it is.
        mesh: its dp_shard ranks share the rows; a parameter without dims is everyone's.
        apart: ids of parameters that are shared out already: experts, which each of their ranks updates whole.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        entries: Mapping[str, Entry],
        mesh: Mesh,
        apart: Collection[int] = (),
    ) -> None:
        self._group = mesh.group("dp_shard")
        self._size, self._rank = mesh.layout.dp_shard, mesh.coordinate("dp_shard")
        self.rows: dict[str, torch.Tensor] = {}
        self.entries: dict[str, Entry] = {}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._whole = {id(parameter) for parameter in parameters.values() if not parameter.dim()}.union(apart)
        for name, parameter in parameters.items():
            if id(parameter) in self._whole:
                self.rows[name], self.entries[name] = parameter, entries[name]
                continue
            start, end = part_bounds(len(parameter), self._size, self._rank)
            self.rows[name] = nn.Parameter(parameter.detach()[start:end])
            vars(self.rows[name]).update(vars(parameter))
            self.entries[name] = _entry_of_rows(entries[name], start, end, mesh)

    def lend(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give the rows of these parameters the gradients that they have."""
        for parameter in parameters:
            if id(parameter) not in self._whole and parameter.grad is not None:
                start, end = part_bounds(len(parameter), self._size, self._rank)
                self.rows[self._names[id(parameter)]].grad = parameter.grad[start:end]

    @torch.no_grad()
    def collect(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make those of these parameters that have gradients whole again, from the rows that each rank has updated.

        Collective: every rank has gradients for the same ones. Afterwards none has any.
        """
        self.gather([parameter for parameter in parameters if parameter.grad is not None])
        for parameter in parameters:
            parameter.grad = self.rows[self._names[id(parameter)]].grad = None

    @torch.no_grad()
    def gather(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make these parameters whole again, from the rows that each rank has changed; collective."""
        cut = [parameter for parameter in parameters if id(parameter) not in self._whole and parameter.numel()]
        for bucket in _buckets(cut):
            self._gather(bucket)

    def _gather(self, parameters: Sequence[torch.Tensor]) -> None:
        lengths = [-(-len(parameter) // self._size) * parameter[0].numel() for parameter in parameters]
        mine = parameters[0].new_zeros(sum(lengths))
        for parameter, place in zip(parameters, mine.split(lengths), strict=True):
            start, end = part_bounds(len(parameter), self._size, self._rank)
            rows = parameter[start:end].reshape(-1)
            place[: len(rows)] = rows
        everyones = mine.new_empty(self._size * len(mine))
        gather_parts(everyones, mine, self._group)
        by_rank = everyones.view(self._size, -1).split(lengths, dim=1)
        for parameter, parts in zip(parameters, by_rank, strict=True):
            parameter.copy_(parts.reshape(-1)[: parameter.numel()].view(parameter.shape))


def _entry_of_rows(entry: Entry, start: int, end: int, mesh: Mesh) -> Entry:
    offset = (entry.box.offset[0] + start, *entry.box.offset[1:])
    placements = {**entry.placements, "dp_shard": "shard(0)"}
    alike = mesh.peers([axis for axis, placement in placements.items() if placement != "replicate"])
    holders = tuple(rank for rank in entry.holders if rank in alike)
    box = replace(entry.box, offset=offset, shape=(end - start, *entry.box.shape[1:]))
    return replace(entry, box=box, placements=placements, holders=holders)


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters of one dtype, in order, up to BUCKET_BYTES at once."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        bucket: list[torch.Tensor] = []
        for parameter in (p for p in parameters if p.dtype is dtype):
            if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(parameter)
        if bucket:
            yield bucket
