"""A rank's file: what its header says, and its bytes in chunks that are checked before anyone sees them.

The format is safetensors (8 bytes of length, a JSON header, the tensors' bytes, little-endian), so any safetensors
reader opens the file. A tensor in it is a box of a logical tensor; `__metadata__.parts` says which: {key: {"offset":
[...], "shape": [whole], "name"?}}. `key` is the logical name; a rank that holds several boxes of one tensor adds "#1",
"#2" ... and gives the name apart. complex128, which safetensors does not know, is stored as pairs of F64.

The file is written here without the safetensors library, which wants all bytes in memory once more; the format is 60
lines.
"""

import errno
import hashlib
import json
import os
import struct
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allranks.checkpointing.manifest import FileRecord
from allranks.errors import CheckpointError
from allranks.ordinary_file import open_ordinary
from allranks.parameter_map import Box

# torch's name of a dtype -> (safetensors' name, bytes of an element, trailing dims that safetensors sees besides)
DTYPES: Final[Mapping[str, tuple[str, int, tuple[int, ...]]]] = {
    "float64": ("F64", 8, ()),
    "float32": ("F32", 4, ()),
    "float16": ("F16", 2, ()),
    "bfloat16": ("BF16", 2, ()),
    "complex128": ("F64", 16, (2,)),
    "complex64": ("C64", 8, ()),
    "int64": ("I64", 8, ()),
    "int32": ("I32", 4, ()),
    "int16": ("I16", 2, ()),
    "int8": ("I8", 1, ()),
    "uint64": ("U64", 8, ()),
    "uint32": ("U32", 4, ()),
    "uint16": ("U16", 2, ()),
    "uint8": ("U8", 1, ()),
    "bool": ("BOOL", 1, ()),
    "float8_e4m3fn": ("F8_E4M3", 1, ()),
    "float8_e5m2": ("F8_E5M2", 1, ()),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1, ()),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1, ()),
    "float8_e8m0fnu": ("F8_E8M0", 1, ()),
}
_READ_BYTES = 1 << 20  # read and hashed while still in the cache
LENGTH: Final = struct.Struct("<Q")  # of the header, in front of it


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a logical tensor in a file: its bytes are `start` to `start + num_bytes` of the file."""

    name: str
    dtype: str
    box: Box
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.num_elements * DTYPES[self.dtype][1]


def render_header(parts: Sequence[Part]) -> bytes:
    """The length and header of a file that holds `parts` in this order; the data begins at a multiple of 8."""
    entries: dict[str, object] = {}
    boxes: dict[str, dict[str, object]] = {}
    end = 0
    for part in parts:
        tag, _, trailing = DTYPES[part.dtype]
        key = part.name
        while key in boxes:
            key = f"{part.name}#{len(boxes)}"
        boxes[key] = {"offset": part.box.offset, "shape": part.shape}
        if key != part.name:
            boxes[key]["name"] = part.name
        offsets = (end, end := end + part.num_bytes)
        entries[key] = {"dtype": tag, "shape": (*part.box.shape, *trailing), "data_offsets": offsets}
    header = json.dumps({"__metadata__": {"parts": json.dumps(boxes)}} | entries).encode()
    header += b" " * (-len(header) % 8)
    return LENGTH.pack(len(header)) + header


def open_regular(path: Path) -> tuple[int, int]:
    """Open an ordinary file for reading: its descriptor and its length. Neither a link nor a pipe leads elsewhere or
    keeps us waiting.

    Raises:
        CheckpointError: it is missing, something else, or may not be read.
    """
    try:
        return open_ordinary(path, follow=False)
    except OSError as error:
        reason = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path}: {reason}; the checkpoint is damaged") from None


class OpenFile:
    """A file of a checkpoint, open for reading; every byte that leaves it has been checked against the manifest."""

    def __init__(self, directory: Path, name: str, record: FileRecord) -> None:
        """Raises CheckpointError where it is missing, no ordinary file, or of another length."""
        self.path, self.name, self._record = directory / name, name, record
        self._descriptor, size = open_regular(self.path)
        if size != record.bytes:
            self.close()
            raise CheckpointError(
                f"{self.path}: {size} bytes, the manifest says {record.bytes}; the checkpoint is damaged"
            )

    def close(self) -> None:
        """Let the file go."""
        os.close(self._descriptor)

    def chunks(self, wanted: Sequence[int] | None = None, num_threads: int = 2) -> Iterator[tuple[int, memoryview]]:
        """The chunks of those numbers (all), in order, as (offset in the file, bytes); the bytes are valid until the
        next one is asked for.

        Chunks are read and hashed ahead in `num_threads` threads, each in a buffer of its own.
        """
        numbers = range(len(self._record.chunks)) if wanted is None else wanted
        longest = max((self._record.chunks[number][1] for number in numbers), default=0)
        buffers = [bytearray(longest) for _ in range(min(num_threads + 1, len(numbers)))]
        ahead: deque[tuple[int, bytearray, Future[memoryview]]] = deque()
        with ThreadPoolExecutor(num_threads) as pool:
            for number in numbers:
                if not buffers:
                    yield from self._take(ahead, buffers)
                buffer = buffers.pop()
                ahead.append((number, buffer, pool.submit(self._read, number, buffer)))
            while ahead:
                yield from self._take(ahead, buffers)

    def _take(
        self, ahead: deque[tuple[int, bytearray, Future[memoryview]]], buffers: list[bytearray]
    ) -> Iterator[tuple[int, memoryview]]:
        number, buffer, future = ahead.popleft()
        yield self._record.chunks[number][0], future.result()
        buffers.append(buffer)

    def _read(self, number: int, buffer: bytearray) -> memoryview:
        offset, length, expected = self._record.chunks[number]
        view, digest, done = memoryview(buffer)[:length], hashlib.sha256(), 0
        while done < length:
            piece = view[done : done + _READ_BYTES]
            try:
                count = os.preadv(self._descriptor, [piece], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: byte {offset + done} cannot be read: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path}: ends at byte {offset + done} of {self._record.bytes}; the checkpoint is damaged"
                )
            digest.update(piece[:count])
            done += count
        if digest.hexdigest() != expected:
            raise CheckpointError(
                f"{self.path}: bytes {offset} to {offset + length} have SHA-256 {digest.hexdigest()[:12]}..., "
                f"the manifest says {expected[:12]}...; the checkpoint is damaged"
            )
        return view

    def covering(self, spans: Sequence[tuple[int, int]]) -> list[int]:
        """The numbers, ascending, of the chunks that hold any byte of the (start, stop) `spans`."""
        spans = sorted(span for span in spans if span[0] < span[1])
        numbers, at = [], 0
        for number, (offset, length, _) in enumerate(self._record.chunks):
            while at < len(spans) and spans[at][1] <= offset:
                at += 1
            if at < len(spans) and spans[at][0] < offset + length:
                numbers.append(number)
        return numbers
