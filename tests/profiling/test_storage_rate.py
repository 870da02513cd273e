"""The rate at which a folder takes a checkpoint."""

import threading
from pathlib import Path

import pytest

from allranks.profiling import storage_rate
from allranks.profiling.storage_rate import PIECE_BYTES, measure_storage


def test_what_was_written_over_the_time_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((10.0, 12.0))
    synced: list[int] = []
    monkeypatch.setattr(storage_rate, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr("os.fsync", synced.append)
    assert measure_storage(tmp_path, 3 * PIECE_BYTES) == 3 * PIECE_BYTES / 2
    assert len(synced) == 1 and not list(tmp_path.iterdir())


def test_every_writer_writes_its_share_and_hashes_it_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread that hashes is one that writes and syncs: the engine overlaps both, and so does the measurement."""
    synced: dict[int, threading.Thread] = {}  # not their numbers: one that has ended gives its own to another
    hashed: list[threading.Thread] = []

    class Digest:
        def update(self, piece: bytes) -> None:
            hashed.append(threading.current_thread())

    ticks = iter((10.0, 12.0))
    monkeypatch.setattr(storage_rate, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr("os.fsync", lambda number: synced.update({number: threading.current_thread()}))
    monkeypatch.setattr("hashlib.sha256", Digest)
    assert measure_storage(tmp_path, 7 * PIECE_BYTES, 3) == 6 * PIECE_BYTES / 2
    assert len(hashed) == 6 and not set(hashed) & set(synced.values())


def test_a_folder_that_takes_nothing_has_no_rate(tmp_path: Path) -> None:
    assert measure_storage(tmp_path / "nowhere", PIECE_BYTES) is None
