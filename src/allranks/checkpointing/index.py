"""Where every box of every tensor lies in a checkpoint's files, read from their headers and checked to be whole.

A header is read as hostile too: its bytes are checked against the manifest first, its numbers are compared with the
length of the file that is really there, and nothing is allocated from them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from allranks.checkpointing.manifest import (
    Count,
    Extent,
    FrozenModel,
    Manifest,
    Name,
    TensorRecord,
    first_reason,
    parse_json,
)
from allranks.checkpointing.tensor_file import DTYPES, LENGTH, OpenFile, Part
from allranks.errors import CheckpointError
from allranks.parameter_map import Box

_HEADER_BYTES_CAP = 100_000_000  # the safetensors library's own
_DIMS_CAP = 33
_PARTS_CAP = 65536  # of one tensor: as many ranks
_SORTED_CAP = 1 << 25  # boxes that are looked at, again and again, until all stand apart: some ten seconds

Index = Mapping[str, Sequence[Part]]


class _Slot(FrozenModel):
    """What a safetensors header says of a tensor."""

    dtype: str
    shape: Annotated[tuple[Extent, ...], Field(max_length=_DIMS_CAP)]
    data_offsets: tuple[Count, Count]


class _Place(FrozenModel):
    """Which box of which logical tensor it is."""

    offset: Annotated[tuple[Extent, ...], Field(max_length=_DIMS_CAP)]
    shape: Annotated[tuple[Extent, ...], Field(max_length=_DIMS_CAP)]
    name: Name | None = None


_SLOTS = TypeAdapter(dict[Name, _Slot])
_PLACES = TypeAdapter(dict[Name, _Place])


def read_index(directory: Path, manifest: Manifest) -> Index:
    """Logical name -> the parts that make it up, for every tensor of the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the boxes leave a hole, overlap or stand outside, in one line.
    """
    index: dict[str, list[Part]] = {name: [] for name in manifest.tensors}
    for part in read_parts(directory, manifest):
        index[part.name].append(part)
    for name, tensor in manifest.tensors.items():
        check_tensor(name, tensor, [part.box for part in index[name]], str(directory))
    return index


def check_tensor(name: str, tensor: TensorRecord, boxes: Sequence[Box], where: str) -> None:
    """See that a tensor of the manifest is of a dtype that is known, and that `boxes` make it up.

    Raises:
        CheckpointError: it is not, or they do not.
    """
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{where}: tensor {name!r} is {tensor.dtype}, which this version does not know")
    check_cover(name, tensor.shape, boxes, where)


def read_parts(directory: Path, manifest: Manifest) -> Iterator[Part]:
    """The parts in every file of the manifest, which need not make up whole tensors.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    for name, record in manifest.files.items():
        with closing(OpenFile(directory, name, record)) as file:
            yield from _read_parts(file, record.bytes, manifest.tensors)


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box], where: str) -> None:
    """See that `boxes` hold every element of a tensor exactly once.

    Raises:
        CheckpointError: they do not, with the numbers.
    """
    boxes = [box for box in boxes if box.num_elements]
    held, total = sum(box.num_elements for box in boxes), math.prod(shape)
    if held != total or len(boxes) > _PARTS_CAP:
        raise CheckpointError(
            f"{where}: tensor {name!r}: {held} of its {total} elements in {len(boxes)} boxes; some are missing or twice"
        )
    looked_at, groups = 0, [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        for dim in range(len(shape)):
            looked_at += len(group)
            apart = _apart(group, dim)
            if len(apart) > 1:
                groups += apart
                break
        else:  # no plane goes between them
            looked_at += len(group) ** 2
            if looked_at <= _SORTED_CAP:
                _check_pairs(group, f"{where}: tensor {name!r}")
        if looked_at > _SORTED_CAP:
            raise CheckpointError(f"{where}: tensor {name!r} is cut in a way that takes too long to check")


def _apart(boxes: Sequence[Box], dim: int) -> list[list[Box]]:
    """The boxes in groups between which a plane across `dim` goes."""
    groups: list[list[Box]] = []
    reach = -1
    for box in sorted(boxes, key=lambda box: box.offset[dim]):
        if box.offset[dim] >= reach:
            groups.append([])
        groups[-1].append(box)
        reach = max(reach, box.offset[dim] + box.shape[dim])
    return groups


def _check_pairs(boxes: Sequence[Box], what: str) -> None:
    for place, box in enumerate(boxes):
        if any(box.intersect(other) for other in boxes[:place]):
            raise CheckpointError(f"{what}: two boxes overlap at {box.offset}")


def _read_parts(file: OpenFile, num_bytes: int, tensors: Mapping[str, TensorRecord]) -> list[Part]:
    """The parts that a file's header lists, in the order of their bytes, which they fill without a gap."""
    where = str(file.path)
    header = _header_bytes(file, num_bytes)
    members = parse_json(header, where)
    metadata = members.pop("__metadata__", None)
    listed = metadata.get("parts") if isinstance(metadata, dict) else None
    if not isinstance(listed, str):
        raise CheckpointError(f"{where}: its header does not say which parts it holds")
    try:
        slots, places = _SLOTS.validate_python(members), _PLACES.validate_python(parse_json(listed.encode(), where))
    except ValidationError as error:
        raise CheckpointError(f"{where}: header: {first_reason(error)}; the checkpoint is damaged") from None
    if slots.keys() != places.keys():
        raise CheckpointError(f"{where}: header: tensors and parts differ: {sorted(slots.keys() ^ places.keys())[:3]}")
    data_start = LENGTH.size + len(header)
    parts = [_part(key, slots[key], places[key], tensors, file, data_start) for key in slots]
    parts.sort(key=attrgetter("start", "num_bytes"))
    end = data_start
    for part in parts:
        if part.start != end:
            raise CheckpointError(f"{where}: {part.name!r} begins at byte {part.start}, the one before ends at {end}")
        end += part.num_bytes
    if end != num_bytes:
        raise CheckpointError(f"{where}: its tensors end at byte {end} of {num_bytes}")
    return parts


def _header_bytes(file: OpenFile, num_bytes: int) -> bytes:
    data = b"".join(bytes(view) for _, view in file.chunks(file.covering([(0, LENGTH.size)]), num_threads=1))
    if len(data) < LENGTH.size:
        raise CheckpointError(f"{file.path}: {num_bytes} bytes hold no header")
    end = LENGTH.size + LENGTH.unpack_from(data)[0]
    if end > min(num_bytes, _HEADER_BYTES_CAP):
        raise CheckpointError(f"{file.path}: a header of {end - LENGTH.size} bytes in a file of {num_bytes}")
    data += b"".join(bytes(view) for _, view in file.chunks(file.covering([(len(data), end)]), num_threads=1))
    return data[LENGTH.size : end]


def _part(
    key: str, slot: _Slot, place: _Place, tensors: Mapping[str, TensorRecord], file: OpenFile, data_start: int
) -> Part:
    """One entry of a header, checked against the manifest's line for its tensor."""
    name, where = place.name or key, f"{file.path}: {key!r}"
    tensor = tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{where} is no tensor of the manifest")
    if slot.dtype != DTYPES.get(tensor.dtype, ("",))[0]:
        raise CheckpointError(f"{where} is {slot.dtype}, the manifest says {tensor.dtype}")
    num_dims, trailing = len(tensor.shape), DTYPES[tensor.dtype][2]
    box = Box(place.offset, slot.shape[:num_dims])
    consistent = place.shape == tensor.shape and len(place.offset) == len(box.shape) == num_dims
    if not (
        consistent
        and slot.shape[num_dims:] == trailing
        and all(
            start + extent <= whole for start, extent, whole in zip(box.offset, box.shape, tensor.shape, strict=True)
        )
    ):
        raise CheckpointError(
            f"{where} has shape {slot.shape} at {place.offset}, the manifest says {tensor.shape} in all"
        )
    part = Part(name, tensor.dtype, box, tensor.shape, file.name, data_start + slot.data_offsets[0])
    if slot.data_offsets[1] - slot.data_offsets[0] != part.num_bytes:
        raise CheckpointError(f"{where}: {slot.shape} of {slot.dtype} at bytes {slot.data_offsets}")
    return part
