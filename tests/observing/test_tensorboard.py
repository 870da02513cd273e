"""What TensorBoard's own reader finds in our files."""

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from allranks.errors import RunError
from allranks.observing.tensorboard import ScalarWriter, _Checksum


def read(directory: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def test_points_come_back_with_step_value_and_time(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    for step in range(1, 301):
        writer.write(step, 1.7e9 + step, {"train/loss": 1 / step, "train/lr": 0.5})
        if step % 100 == 0:
            writer.write(step, 1.7e9 + step, {"validation/accuracy": step / 512})
    writer.close()
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    assert sorted(reader.Tags()["scalars"]) == ["train/loss", "train/lr", "validation/accuracy"]
    losses = reader.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 301))
    assert [event.value for event in losses] == pytest.approx([1 / step for step in range(1, 301)], rel=1e-7)
    assert losses[9].wall_time == 1.7e9 + 10
    assert read(tmp_path, "validation/accuracy") == [(step, step / 512) for step in (100, 200, 300)]


def test_what_was_flushed_is_readable_while_the_file_grows(tmp_path: Path) -> None:
    writer = ScalarWriter(tmp_path)
    writer.write(1, 1.0, {"train/loss": 1.0})
    writer.flush()
    assert read(tmp_path, "train/loss") == [(1, 1.0)]
    writer.close()


def test_a_step_done_again_appears_once(tmp_path: Path) -> None:
    first = ScalarWriter(tmp_path)
    for step in range(1, 8):
        first.write(step, step, {"train/loss": step})
    first.close()
    second = ScalarWriter(tmp_path, purge_from=4)
    for step in (4, 5):
        second.write(step, 10 + step, {"train/loss": 100 + step})
    second.close()
    assert read(tmp_path, "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 104), (5, 105)]


def test_a_later_file_sorts_behind_one_from_a_clock_ahead(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.9999999990.zzz.1").touch()
    writers = [ScalarWriter(tmp_path) for _ in range(3)]
    paths = [writer.path.name for writer in writers]
    for writer in writers:
        writer.close()
    assert sorted(os.listdir(tmp_path))[1:] == paths
    assert [re.findall(r"\d{10}", path)[0] for path in paths] == ["9999999991", "9999999992", "9999999993"]


@given(st.binary(max_size=300))
@example(bytes(range(256)) * 5)
def test_the_checksum_is_tensorboards(data: bytes) -> None:
    assert int.from_bytes(CHECKSUM.masked(data), "little") == masked_crc32c(data)


CHECKSUM = _Checksum()


class Full(io.BytesIO):
    """A file on a full disk."""

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    writer: Any = ScalarWriter(tmp_path)
    kept, writer._file = writer._file, Full()
    with pytest.raises(RunError, match=r"tfevents.* cannot be written: No space left on device; make room there, or"):
        writer.flush()
    kept.close()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        ScalarWriter(tmp_path / "file" / "tensorboard")


class FullDisk(io.RawIOBase):
    """Gives a file its name, and takes nothing of it."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_file_that_takes_nothing_when_it_is_opened_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever tries again each second would fill the directory with empty ones."""

    def open_full(path: Path, mode: str, buffering: int) -> io.BufferedWriter:
        path.touch(exist_ok=False)
        return io.BufferedWriter(FullDisk(), buffering)

    monkeypatch.setattr(Path, "open", open_full)
    for purge_from in (None, 4):
        with pytest.raises(RunError, match=r"tfevents.* cannot be written: No space left on device; make room there"):
            ScalarWriter(tmp_path, purge_from=purge_from)
    assert not list(tmp_path.iterdir())
