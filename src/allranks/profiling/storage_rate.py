"""How fast a folder takes a checkpoint: hashed beside the writing, and synced, as every process of a node does it."""

import hashlib
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Final

PIECE_BYTES: Final = 2**20
NUM_BYTES, QUICK_NUM_BYTES = 2**28, 2**26
"""A second or less on any disk that is worth training on."""


def measure_storage(folder: Path, num_bytes: int, num_writers: int = 1) -> float | None:
    """Bytes/s that a node writes to `folder` until they are on the disk; None where it cannot be written.

    Nothing stays there. Writers are threads in the place of processes: neither hashing nor writing a piece holds the
    interpreter.

    Args:
        num_writers: processes of the node, each of which writes its share into a file of its own.
    """
    piece = os.urandom(PIECE_BYTES)
    num_pieces = max(1, num_bytes // (PIECE_BYTES * num_writers))
    try:
        with ThreadPoolExecutor(num_writers) as pool:
            started = perf_counter()
            written = [pool.submit(_write, folder, piece, num_pieces) for _ in range(num_writers)]
            for one in written:
                one.result()
            seconds = perf_counter() - started
    except OSError:
        return None
    return num_writers * num_pieces * PIECE_BYTES / seconds


def _write(folder: Path, piece: bytes, num_pieces: int) -> None:
    """As checkpointing/writing.py does: each piece is hashed in a thread while it is written."""
    digest = hashlib.sha256()
    with tempfile.TemporaryFile(dir=folder) as file, ThreadPoolExecutor(1) as hashing:
        for _ in range(num_pieces):
            hashed = hashing.submit(digest.update, piece)
            file.write(piece)
            hashed.result()
        file.flush()
        os.fsync(file.fileno())
