"""Writing one rank's file: one pass, hashed while it is written, with at most one tensor's copy in memory besides."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from allranks import fault_points
from allranks.checkpointing.manifest import CHUNK_BYTES, FileRecord
from allranks.checkpointing.tensor_file import Part, render_header

_SMALL_BYTES = 1 << 17  # below, handing the piece to the hashing thread costs more than hashing it


def write_file(
    path: Path, tensors: Sequence[tuple[Part, torch.Tensor]], check: Callable[[], None] = lambda: None
) -> FileRecord:
    """Write a new safetensors file of `tensors` in this order, wait until it is on the disk, and say what was written.

    Args:
        check: called before each piece, of a chunk at most; what it raises ends the writing.

    Raises:
        OSError: the system's refusal.
    """
    chunks: list[tuple[int, int, str]] = []
    start, length, digest = 0, 0, hashlib.sha256()
    with path.open("xb", buffering=1 << 20) as file, ThreadPoolExecutor(1) as pool:
        for piece, ends_chunk in _pieces(tensors):
            check()
            fault_points.reach("checkpoint.write")
            if len(piece) < _SMALL_BYTES:
                digest.update(piece)
                file.write(piece)
            else:
                hashed = pool.submit(digest.update, piece)
                file.write(piece)
                hashed.result()
            length += len(piece)
            if ends_chunk:
                chunks.append((start, length, digest.hexdigest()))
                start, length, digest = start + length, 0, hashlib.sha256()
        file.flush()
        fault_points.reach("checkpoint.sync")
        os.fsync(file.fileno())
    return FileRecord(bytes=start, chunks=tuple(chunks))


def _pieces(tensors: Sequence[tuple[Part, torch.Tensor]]) -> Iterator[tuple[memoryview, bool]]:
    """The file's bytes in pieces that cross no end of a chunk, and whether the piece ends one.

    A chunk ends with the header, so that a reader need not hash 16 MiB of data to read it.
    """
    header = memoryview(render_header([part for part, _ in tensors]))
    for begin in range(0, len(header), CHUNK_BYTES):
        piece = header[begin : begin + CHUNK_BYTES]
        yield piece, len(piece) == CHUNK_BYTES or begin + len(piece) == len(header)
    left, room = sum(part.num_bytes for part, _ in tensors), CHUNK_BYTES
    for _, tensor in tensors:
        for block in _host_bytes(tensor):
            for piece in _cut(block, room):
                left, room = left - len(piece), room - len(piece)
                yield piece, left == 0 or room == 0
                room = room or CHUNK_BYTES


def _cut(block: memoryview, room: int) -> Iterator[memoryview]:
    """`block` in a first piece of at most `room` bytes, and others of at most a chunk."""
    begin = 0
    while begin < len(block):
        yield block[begin : begin + room]
        begin, room = begin + room, CHUNK_BYTES


def _host_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order: where they lie if that is the host, else copied a chunk at a time."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    step = max(1, flat.numel()) if flat.is_cpu else CHUNK_BYTES
    for begin in range(0, flat.numel(), step):
        block: Any = flat[begin : begin + step].cpu().numpy()
        yield memoryview(block)
