"""Where the boxes of all tensors lie, as a table of numbers: small enough to be sent, and for every rank to hold.

A row is a part: which tensor, which file, at which byte its box begins, the box's offset and its shape; tensors and
files are numbers in the order of the manifest. That is 24 bytes and 16 for each dim. A `Part` is made only of what is
asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import final

import torch

from allranks.checkpointing.manifest import Manifest
from allranks.checkpointing.tensor_file import Part
from allranks.parameter_map import Box

_TENSOR, _FILE, _START, _BOX = range(4)  # columns; from _BOX on the offset, and behind it the shape


@final
class IndexTable(Mapping[str, Sequence[Part]]):
    """An `Index` (index.py) of such rows; `meeting` finds the parts of a tensor that a box needs.

    Args:
        manifest: of the checkpoint.
        rows: as `encode_parts` makes them, of all of its files, in any order.
    """

    def __init__(self, manifest: Manifest, rows: bytes) -> None:
        self._names, self._files = tuple(manifest.tensors), tuple(manifest.files)
        self._tensors, self._dims = manifest.tensors, _dims(manifest)
        table = torch.frombuffer(bytearray(rows), dtype=torch.int64) if rows else torch.empty(0, dtype=torch.int64)
        table = table.view(-1, _BOX + 2 * self._dims)
        for column in (_START, _FILE, _TENSOR):
            table = table[table[:, column].argsort(stable=True)]
        places = torch.searchsorted(table[:, _TENSOR].contiguous(), torch.arange(len(self._names) + 1)).tolist()
        self._table, self._places = table, dict(zip(self._names, pairwise(places), strict=True))

    def __getitem__(self, name: str) -> list[Part]:
        """The parts that make it up, by file and byte."""
        return self._parts(name, self._rows(name))

    def __iter__(self) -> Iterator[str]:
        """The tensors' names."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self._names)

    def meeting(self, name: str, box: Box) -> list[Part]:
        """The parts of a tensor that have something in common with `box`, by file and byte."""
        rows, dims = self._rows(name), len(box.shape)
        offset, shape = (rows[:, at : at + dims] for at in (_BOX, _BOX + self._dims))
        first = torch.tensor(box.offset, dtype=torch.int64)
        last = first + torch.tensor(box.shape, dtype=torch.int64)
        meets = torch.maximum(offset, first) < torch.minimum(offset + shape, last)
        return self._parts(name, rows[meets.all(1)])

    def _rows(self, name: str) -> torch.Tensor:
        first, end = self._places[name]
        return self._table[first:end]

    def _parts(self, name: str, rows: torch.Tensor) -> list[Part]:
        record, found = self._tensors[name], list[Part]()
        dims = len(record.shape)
        for row in rows.tolist():
            offset, shape = (tuple(row[at : at + dims]) for at in (_BOX, _BOX + self._dims))
            found.append(
                Part(name, record.dtype, Box(offset, shape), record.shape, self._files[row[_FILE]], row[_START])
            )
        return found


def encode_parts(parts: Iterable[Part], manifest: Manifest) -> bytes:
    """Their rows, of int64 as this machine has it."""
    tensors, files = ({name: at for at, name in enumerate(some)} for some in (manifest.tensors, manifest.files))
    dims, rows = _dims(manifest), list[list[int]]()
    for part in parts:
        row = [tensors[part.name], files[part.file], part.start]
        for numbers in (part.box.offset, part.box.shape):
            row += [*numbers, *(0 for _ in range(dims - len(numbers)))]
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).numpy().tobytes()


def _dims(manifest: Manifest) -> int:
    """The most that a tensor has."""
    return max((len(tensor.shape) for tensor in manifest.tensors.values()), default=0)
