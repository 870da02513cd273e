"""How fast a folder takes a checkpoint: hashed, written and synced, as the engine writes one."""

import hashlib
import os
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Final

PIECE_BYTES: Final = 2**20
NUM_BYTES, QUICK_NUM_BYTES = 2**28, 2**26
"""A second or less on any disk that is worth training on."""


def measure_storage(folder: Path, num_bytes: int) -> float | None:
    """Bytes/s that one process writes to `folder` until they are on the disk; None where it cannot be written.

    Nothing stays there.
    """
    piece, digest = os.urandom(PIECE_BYTES), hashlib.sha256()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            started = perf_counter()
            for _ in range(max(1, num_bytes // PIECE_BYTES)):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            seconds = perf_counter() - started
    except OSError:
        return None
    return max(1, num_bytes // PIECE_BYTES) * PIECE_BYTES / seconds
