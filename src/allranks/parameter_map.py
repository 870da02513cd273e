"""Who a parameter is: the one answer that norm, optimizer groups, checkpoints, digests and sentinels share.

A ParameterMap is made by `parallel.parallelize` and passed on as an argument. It names every parameter and buffer by
its logical (unsharded, unwrapped) name and says which box of it this rank holds. It imports no torch: the tensors
travel beside it.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a logical tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim.

    Attributes:
        packed: of how many matrices, one behind the other along `packed_dim`, the tensor consists (query, key and value
            of attention). Their rows count in turn here: of three, row r of matrix m is row 3 * r + m. So a range of
            rows is some rows of each, and a part of some heads is one box.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    packed: int = 1
    packed_dim: int = 0

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor of `shape`."""
        return Box((0,) * len(shape), shape)

    @property
    def num_elements(self) -> int:
        """Elements in the box; 1 for a 0-dim tensor."""
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    def intersect(self, other: "Box") -> "Box | None":
        """The common part, in the logical tensor's coordinates, or None where they do not meet; neither is packed."""
        assert self.packed == other.packed == 1, "rows that count in turn have no box in common with others: see pieces"
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(extent > 0 for extent in shape) else None

    def pieces(self, whole: tuple[int, ...]) -> "list[tuple[Box, tuple[slice, ...]]]":
        """(box that is not packed, where it lies in this one's tensor) of all that it holds, of a tensor of `whole`."""
        if self.packed == 1:
            return [(self, tuple(slice(0, extent) for extent in self.shape))]
        dim, found = self.packed_dim, []
        first, end, rows = self.offset[dim], self.offset[dim] + self.shape[dim], whole[dim] // self.packed
        for which in range(self.packed):
            start = first + (which - first) % self.packed
            number = len(range(start, end, self.packed))
            offset, shape, place = list(self.offset), list(self.shape), [slice(0, extent) for extent in self.shape]
            offset[dim], shape[dim] = which * rows + start // self.packed, number
            place[dim] = slice(start - first, self.shape[dim], self.packed)
            # Of nothing one piece stays, which has the name.
            if number or (which == 0 and self.shape[dim] == 0):
                found.append((Box(tuple(offset), tuple(shape)), tuple(place)))
        return found

    def place(self, whole: tuple[int, ...]) -> tuple[slice | list[int], ...]:
        """What indexes it in a tensor of shape `whole`, in the order in which it is held."""
        found: list[slice | list[int]] = [slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True)]
        if self.packed > 1:
            dim, rows = self.packed_dim, whole[self.packed_dim] // self.packed
            counted = range(self.offset[dim], self.offset[dim] + self.shape[dim])
            found[dim] = [row % self.packed * rows + row // self.packed for row in counted]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Entry:
    """One logical tensor, and the part of it that this rank holds.

    Attributes:
        name: logical name, without wrapper prefixes ("layers.0.weight"; of several modules "generator.0.weight").
        shape: of the whole tensor.
        dtype: torch's name without the prefix ("float32").
        kind: "parameter" or "buffer".
        placements: mesh axis -> "replicate" or "shard(d)".
        box: this rank's part.
        holders: the global ranks, ascending, that hold this very box.
        alias_of: the name under which the tensor is stored where it is shared (tied weights), else None.
        unit: the logical name of the module that is gathered as one, "" where nothing is.
        stage: the pipeline stage.
        persistent: whether it belongs in a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    holders: tuple[int, ...]
    kind: Literal["parameter", "buffer"] = "parameter"
    placements: Mapping[str, str] = field(default_factory=dict)
    alias_of: str | None = None
    trainable: bool = True
    unit: str = ""
    stage: int = 0
    persistent: bool = True

    @property
    def writer(self) -> int:
        """The holder that writes this box to a checkpoint: spread over them by name, agreed without communication."""
        return self.holders[zlib.crc32(self.name.encode()) % len(self.holders)]

    @property
    def sharded(self) -> bool:
        """Whether this rank holds less than the whole."""
        return self.box.shape != self.shape


EACH = "@each"  # ends the name of a tensor whose first dim counts those who keep something of their own


def one_of_each(entry: Entry, index: int, number: int, holders: tuple[int, ...]) -> Entry:
    """What one of `number` keeps for itself of `entry`: row `index` of a tensor [number, ...] under `NAME@each`.

    Args:
        holders: the global ranks, ascending, that keep this very row.
    """
    own = entry.box
    box = Box((index, *own.offset), (1, *own.shape), own.packed, own.packed_dim + 1 if own.packed > 1 else 0)
    return replace(entry, name=entry.name + EACH, shape=(number, *entry.shape), box=box, holders=holders)


class ParameterMap(Mapping[str, Entry]):
    """Logical name -> Entry, for every parameter and buffer of the model, in the model's own order."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<ParameterMap {len(self)} tensors, {len(self.aliases)} aliases>"

    @property
    def aliases(self) -> dict[str, str]:
        """Alias -> the name under which its tensor is stored."""
        return {name: entry.alias_of for name, entry in self._entries.items() if entry.alias_of is not None}

    @property
    def stored(self) -> dict[str, Entry]:
        """The entries that a checkpoint stores: persistent, and each tied tensor once."""
        return {name: entry for name, entry in self._entries.items() if entry.alias_of is None and entry.persistent}
