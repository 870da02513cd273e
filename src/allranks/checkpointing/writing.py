"""Writing one rank's file: one pass, hashed while it is written, with at most one tensor's copy in memory besides.

A thread syncs behind the writer, so that the disk works while the processor hashes, and the last sync has little left.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch

from allranks import fault_points
from allranks.checkpointing.manifest import CHUNK_BYTES, FileRecord
from allranks.checkpointing.tensor_file import Part, render_header

_SMALL_BYTES = 1 << 17  # below, handing the piece to the hashing thread costs more than hashing it
_SYNC_BYTES = 4 * CHUNK_BYTES  # written since the disk was last told to take what there is


class _SyncBehind:
    """Has the disk take a file's bytes while more of them are written; on leaving, nothing is under way any more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is not None:
            self._thread.join()

    def written(self, num_bytes: int) -> None:
        """Take note of bytes that the system has now. Raises as `finish`."""
        self._written += num_bytes
        if self._written >= _SYNC_BYTES and not (self._thread is not None and self._thread.is_alive()):
            self.begin()

    def begin(self) -> None:
        """Have the disk take all that the system has now. Raises as `finish`."""
        self.finish()
        self._written = 0
        self._thread = threading.Thread(target=self._sync, daemon=True)  # a disk that hangs keeps no process
        self._thread.start()

    def finish(self) -> None:
        """Wait until the disk has what it was told to take.

        Raises:
            OSError: what the disk said; the system says it once, so no later sync would.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _sync(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error


def write_file(
    path: Path,
    tensors: Sequence[tuple[Part, torch.Tensor]],
    check: Callable[[], None] = lambda: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> FileRecord:
    """Write a new safetensors file of `tensors` in this order, wait until it is on the disk, and say what was written.

    Where that fails nothing of it stays: a disk that it has filled has room again for what else the run writes.

    Args:
        check: called before each piece, of a chunk at most; what it raises ends the writing.
        meanwhile: called once, when all is written and the disk still takes it; what it raises ends the writing.

    Raises:
        OSError: the system's refusal.
    """
    chunks: list[tuple[int, int, str]] = []
    start, length, digest = 0, 0, hashlib.sha256()
    with (
        path.open("xb", buffering=1 << 20) as file,
        _gone_on_error(path),
        ThreadPoolExecutor(1) as pool,
        _SyncBehind(file.fileno()) as behind,
    ):
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
            behind.written(len(piece))
            if ends_chunk:
                chunks.append((start, length, digest.hexdigest()))
                start, length, digest = start + length, 0, hashlib.sha256()
        file.flush()
        behind.begin()
        meanwhile()
        behind.finish()
        fault_points.reach("checkpoint.sync")
        os.fsync(file.fileno())
    return FileRecord(bytes=start, chunks=tuple(chunks))


@contextmanager
def _gone_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


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
