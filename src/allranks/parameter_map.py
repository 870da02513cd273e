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
    """A rectangular part of a logical tensor: `offset[d] <= index[d] < offset[d] + shape[d]` in every dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

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
        """The common part, in the logical tensor's coordinates, or None where they do not meet."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = (
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(extent > 0 for extent in shape) else None


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
    box = Box((index, *entry.box.offset), (1, *entry.box.shape))
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
