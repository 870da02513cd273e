"""TensorBoard's points on a disk that refuses them for a while: held back, written later, and what is lost is told."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from allranks.errors import RunError
from allranks.observing import board as board_module
from allranks.observing import tensorboard
from allranks.observing.board import Board
from allranks.observing.tensorboard import ScalarWriter


class Disk(io.RawIOBase):
    """The file, of which a full disk takes nothing."""

    def __init__(self, path: Path) -> None:
        self.full = False
        self._file = path.open("ab", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def opened(tmp_path: Path, warned: list[str] | None) -> tuple[Any, Disk]:
    """A Board with a step in its file, which is on a Disk; small buffers."""
    board: Any = Board(tmp_path, None, None if warned is None else warned.append)
    board.add(1, 1.0, {"loss": 1.0})
    board.flush()
    disk = Disk(board._writer.path)
    board._writer._file.close()
    board._writer._file = io.BufferedWriter(disk, 128)
    return board, disk


def fill(board: Any, disk: Disk) -> None:
    """Steps 2 to 19, none of which the disk takes."""
    disk.full = True
    for step in range(2, 20):
        board.add(step, 1.0, {"loss": 1.0})
        board.flush()


def steps(tmp_path: Path) -> list[int]:
    reader = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    return [point.step for point in reader.Scalars("loss")]


def test_points_that_a_full_disk_refuses_are_written_when_it_has_room(tmp_path: Path) -> None:
    warned = list[str]()
    board, disk = opened(tmp_path, warned)
    fill(board, disk)
    (line,) = warned
    assert "cannot be written: No space left on device; " in line and "held back" in line
    disk.full = False
    board.flush()
    board.close()
    assert steps(tmp_path) == list(range(1, 20)) and len(warned) == 1


def test_what_is_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "HELD_POINTS", 5)
    warned = list[str]()
    board, disk = opened(tmp_path, warned)
    fill(board, disk)
    board.close()
    board.close()
    assert len(warned) == 3 and "what was held back is lost" in warned[1]
    assert f" steps are not in {tmp_path}, " in warned[2] and steps(tmp_path) == [1]


def test_a_place_that_refuses_at_first_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "tb").touch()
    warned = list[str]()
    board = Board(tmp_path / "tb", None, warned.append)
    for step in (1, 2):
        board.add(step, 1.0, {"loss": 1.0})
        board.flush()
    assert len(warned) == 1 and "cannot be written: File exists" in warned[0]
    (tmp_path / "tb").unlink()
    board.flush()
    board.close()
    assert steps(tmp_path / "tb") == [1, 2] and len(warned) == 1


def test_a_refusal_that_is_over_keeps_no_point_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "tb").touch()
    warned = list[str]()
    board: Any = Board(tmp_path / "tb", None, warned.append)
    board.add(1, 1.0, {"loss": 1.0})
    board.write_down()
    board._opening.join()  # refused, and nobody has looked since
    (tmp_path / "tb").unlink()
    board.flush()
    board.close()
    assert steps(tmp_path / "tb") == [1] and len(warned) == 1


def test_a_file_that_is_opened_late_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any, **named: Any) -> ScalarWriter:
        time.sleep(0.2)
        return ScalarWriter(*given, **named)

    monkeypatch.setattr(tensorboard, "ScalarWriter", slow)
    board: Any = Board(tmp_path, None, None)
    board.add(1, 1.0, {"loss": 1.0})
    board.write_down()
    board.close()
    board._opening.join()
    assert board._writer._file.closed


def test_where_nobody_is_told_it_is_raised(tmp_path: Path) -> None:
    board, disk = opened(tmp_path, None)
    disk.full = True
    board.add(2, 1.0, {"loss": 1.0})
    with pytest.raises(RunError, match="No space left on device"):
        board.flush()
    with pytest.raises(RunError, match="No space left on device"):
        board.close()
