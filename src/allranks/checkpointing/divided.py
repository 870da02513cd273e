"""A checkpoint's files, read by the ranks of a group, each its part, for all of them.

Of n files and n ranks each rank opens a few instead of all n, and the bytes are read once instead of by one rank for
all or by every rank for itself. All of it is collective, and what one rank finds wrong is everybody's error.
"""

from collections.abc import Callable
from contextlib import closing

import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.checkpointing.index import Index, check_tensor, read_index, read_parts
from allranks.checkpointing.index_table import IndexTable, encode_parts
from allranks.checkpointing.manifest import Manifest
from allranks.checkpointing.peers import first_word
from allranks.checkpointing.tensor_file import OpenFile
from allranks.errors import CheckpointError


def read_index_divided(checkpoint: Checkpoint, group: dist.ProcessGroup | None, device: torch.device) -> Index:
    """As `read_index`: every rank reads the headers of some files, and hears of the others'.

    Args:
        checkpoint: the same one on every rank.
        group: who reads; None: this process alone, which reads all.
        device: where the group's backend wants its tensors.

    Raises:
        CheckpointError: on every rank, as `read_index` on one.
        ProcessError: a peer was lost.
    """
    if group is None:
        return read_index(checkpoint.path, checkpoint.manifest)
    manifest, rank, size = checkpoint.manifest, dist.get_rank(group), dist.get_world_size(group)
    mine = dict(list(manifest.files.items())[rank::size])
    rows, wrong = b"", ""
    try:
        rows = encode_parts(read_parts(checkpoint.path, manifest.model_copy(update={"files": mine})), manifest)
    except CheckpointError as error:
        wrong = str(error)
    _agree(wrong, group, device)
    index = IndexTable(manifest, broadcast_bytes(b"".join(gather_bytes(rows, group, device)), group, device))
    wrong = ""
    try:
        for name, tensor in list(manifest.tensors.items())[rank::size]:
            check_tensor(name, tensor, [part.box for part in index[name]], str(checkpoint.path))
    except CheckpointError as error:
        wrong = str(error)
    _agree(wrong, group, device)
    return index


def verify_files_divided(
    checkpoint: Checkpoint,
    group: dist.ProcessGroup | None,
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """As `verify_files`: every rank reads as many bytes as the others, to a chunk, and calls `progress` after each.

    Raises as `read_index_divided`, and where bytes are not those of the manifest.
    """
    read_index_divided(checkpoint, group, device)
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    wrong = ""
    try:
        for name, numbers in _portion(checkpoint.manifest, rank, size).items():
            with closing(OpenFile(checkpoint.path, name, checkpoint.manifest.files[name])) as file:
                for _ in file.chunks(numbers):
                    progress()
    except CheckpointError as error:
        wrong = str(error)
    _agree(wrong, group, device)


def _portion(manifest: Manifest, rank: int, size: int) -> dict[str, list[int]]:
    """File -> the numbers of the chunks that this rank reads: a run of the bytes of all files, one behind the other.

    Files would not do: one rank would read two where others read one, and be waited for as long again.
    """
    total, at = sum(record.bytes for record in manifest.files.values()), 0
    found: dict[str, list[int]] = {}
    for name, record in manifest.files.items():
        for number, (_, length, _) in enumerate(record.chunks):
            if at * size // total == rank:
                found.setdefault(name, []).append(number)
            at += length
    return found


def _agree(wrong: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """See that no rank has found anything wrong. Raises CheckpointError, on every rank: one has."""
    said = first_word(wrong, group, device)
    if said:
        raise CheckpointError(said)
