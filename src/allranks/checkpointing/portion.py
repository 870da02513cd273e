"""One rank's portion of a checkpoint: what it writes, as values, and the writing, which calls no collective.

A portion may hold the live tensors (a save that the training waits for) or copies of them that no step changes (one
that is written beside it); the file is the same.
"""

import errno
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allranks import fault_points
from allranks.checkpointing.checkpoint import Header, step_name
from allranks.checkpointing.commit import Share, check_target, explain
from allranks.checkpointing.manifest import decode_state, encode_state
from allranks.checkpointing.parts import Parts, stored_parts, tensor_digest
from allranks.checkpointing.tensor_file import Part
from allranks.checkpointing.writing import write_file
from allranks.errors import CheckpointError
from allranks.parameter_map import Entry
from allranks.recorded import note_device_error

Digests = list[tuple[Any, ...]]
"""Of each box: name, dtype, whole shape, the box's offset and shape, its share of the tensor's digest."""

_TOKEN = re.compile(r"\w{1,64}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint is written, and what it becomes: `temporary`, and after the commit `target`."""

    target: Path
    temporary: Path
    header: Header


@dataclass(frozen=True, slots=True)
class Portion:
    """What one rank has to write, and what it tells the one that commits.

    Attributes:
        rank: this rank in the world.
        mine: the boxes that it writes.
        held: name, dtype and whole shape of all that it holds, whoever writes it; empty where another rank tells.
        aliases: of tied tensors, alias -> the name that is stored.
        state: whatever is no tensor; a copy.
        digests: of `mine`, where they are known already; None: they are computed while the portion is written.
    """

    rank: int
    mine: Parts = ()
    held: Sequence[tuple[str, str, Sequence[int]]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    digests: Digests | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the boxes that it writes."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.mine)


def place_of(directory: Path | str, header: Header, token: str) -> Place:
    """The place of step `header.step` below `directory`; `token` is the run's attempt's."""
    directory, name = Path(directory), step_name(header.step)
    return Place(directory / name, directory / f"{name}.tmp-{token}", header)


def portion_of(
    parts: Parts, rank: int, aliases: Mapping[str, str], state: Mapping[str, Any], *, tells: bool
) -> Portion:
    """The Portion of a rank that holds `parts`; it refers to the live tensors.

    Raises:
        CheckpointError: a tensor or a value of the state has no place in a checkpoint.
    """
    stored = stored_parts(parts)
    mine = [(entry, tensor) for entry, tensor in stored if _writes(entry, rank)]
    held = [(entry.name, entry.dtype, entry.shape) for entry, _ in stored] if tells else []
    return Portion(rank, mine, held, dict(aliases), decode_state(encode_state(state)))


def write_portion(
    place: Place, portion: Portion, check: Callable[[], None] = lambda: None, *, looks: bool = True
) -> Share:
    """Write this rank's file and wait until it is on the disk; the Share holds the reason where that fails. Raises no
    Exception.

    Args:
        check: called before each piece; what it raises ends the writing.
        looks: whether it sees first that what has the name already may be replaced. Of ranks on several hosts only the
            one that commits does: what it finds wrong all ranks hear with its Share, and the others' file systems
            would remember that the name is not there when it is (looking_again.py).
    """
    try:
        if not _TOKEN.fullmatch(place.temporary.name.partition(".tmp-")[2]):
            raise CheckpointError(f"{place.temporary.name}: a token is letters and digits")
        if looks:
            check_target(place.target, place.header)
        place.temporary.mkdir(parents=True, exist_ok=True)
        _check_room(place.temporary, portion.num_bytes)
        fault_points.reach("checkpoint.stage")
        digests: Digests = []
        files = _write(place.temporary, portion, check, lambda: digests.extend(_digests(portion)))
        return Share(portion.rank, "", files, digests, portion.held, portion.aliases)
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        note_device_error(error)
        return failed_share(place, portion.rank, error, portion.num_bytes)


def _check_room(directory: Path, num_bytes: int) -> None:
    """See that so much is free, before other programs' disk is full. Raises OSError; a quota shows only later."""
    disk = os.statvfs(directory)
    if (disk.f_bfree if os.geteuid() == 0 else disk.f_bavail) * disk.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))


def failed_share(place: Place, rank: int, error: Exception, num_bytes: int = 0) -> Share:
    """The Share of a rank that could not write its `num_bytes`."""
    return Share(rank, error=f"rank {rank}: {explain(error, place.temporary, num_bytes)}")


def digests_of(mine: Parts) -> Digests:
    """What the boxes add to their tensors' digests."""
    return [
        (e.name, e.dtype, e.shape, e.box.offset, e.box.shape, tensor_digest(tensor, e.box.offset)) for e, tensor in mine
    ]


def _digests(portion: Portion) -> Digests:
    return digests_of(portion.mine) if portion.digests is None else portion.digests


def file_name(rank: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"rank-{rank:05d}.safetensors"


def _writes(entry: Entry, rank: int) -> bool:
    """Whether this rank writes that box. An empty box is written only where the whole tensor is empty."""
    empty = entry.box.num_elements == 0 and math.prod(entry.shape) > 0
    return entry.writer == rank and not empty


def _write(
    temporary: Path, portion: Portion, check: Callable[[], None], meanwhile: Callable[[], None]
) -> dict[str, Any]:
    """Write the file, if there is anything to write, and return its name and record; as `write_file`."""
    if not portion.mine:
        return {}
    # Wide elements first: then every element begins at a multiple of its size, and none lies across two chunks.
    ordered = sorted(portion.mine, key=lambda pair: -pair[1].element_size())
    tensors = [(Part(entry.name, entry.dtype, entry.box, entry.shape), tensor) for entry, tensor in ordered]
    name = file_name(portion.rank)
    return {name: write_file(temporary / name, tensors, check, meanwhile).model_dump()}
