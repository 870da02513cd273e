"""Every line of a journal is strict JSON, whole and in order, whatever was written and whatever tore it."""

import json
import math
import os
import threading
from pathlib import Path
from typing import Any, Never

import pytest

from allranks.errors import RunError
from allranks.observing import journal as journal_module
from allranks.observing.journal import Journal, take_over


def read(path: Path) -> list[dict[str, Any]]:
    """The lines, by a reader that knows no NaN."""

    def refuse(constant: str) -> Never:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_begins_with_time_and_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal" / "rank-00000.jsonl")
    journal.write("step", step=1, samples=32, loss=2.5, ledger="00ff")
    journal.write("end", t=12.5, reason="done")
    journal.close()
    journal.close()
    first, second = read(journal.path)
    assert list(first) == ["t", "event", "step", "samples", "loss", "ledger"]
    assert isinstance(first["t"], float)
    assert first["t"] > 1.7e9
    assert second == {"t": 12.5, "event": "end", "reason": "done"}


def test_numbers_keep_every_bit(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    values = [0.1 + 0.2, 1e-308, math.pi, 2**63]
    for value in values:
        journal.write("step", loss=value)
    assert [line["loss"] for line in read(journal.path)] == values
    journal.close()


def test_what_is_not_finite_is_spelled_beside_null(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.write("step", loss=math.nan, grad_norm=math.inf, lr=0.1)
    journal.write("evaluation", metrics={"a": -math.inf, "b": 1.0}, curve=[1.0, math.nan])
    journal.close()
    step, evaluation = read(journal.path)
    assert list(step.items())[2:] == [
        *(("loss", None), ("loss_text", "nan"), ("grad_norm", None), ("grad_norm_text", "inf"), ("lr", 0.1))
    ]
    assert evaluation["metrics"] == {"a": None, "a_text": "-inf", "b": 1.0}
    assert evaluation["curve"] == [1.0, "nan"]


def test_a_torn_line_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"t": 1.0, "event": "start"}\n{"t": 2.0, "ev')
    journal = Journal(path)
    journal.write("resume", step=3)
    journal.close()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"t": 2.0, "ev'
    assert json.loads(lines[2])["step"] == 3
    again = Journal(path)
    again.close()
    assert path.read_text().splitlines() == lines


def test_each_line_is_one_write_on_an_append_only_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    write = os.write

    def count(descriptor: int, content: bytes) -> int:
        written.append(content)
        return write(descriptor, content)

    journal, other = Journal(tmp_path / "j.jsonl"), Journal(tmp_path / "j.jsonl")
    monkeypatch.setattr(os, "write", count)
    journal.write("a", text="long " * 4000)
    other.write("b")
    journal.write("c")
    assert [content.count(b"\n") for content in written] == [1, 1, 1]
    assert [line["event"] for line in read(journal.path)] == ["a", "b", "c"]
    journal.close()
    other.close()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    journal = Journal(tmp_path / "j.jsonl")
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    journal.write("step", step=1)
    journal.close()
    assert read(journal.path)[0]["step"] == 1


def test_threads_never_mix_their_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")

    def write(number: int) -> None:
        for _ in range(200):
            journal.write("step", step=number, pad="x" * 200)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert len(read(journal.path)) == 800


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j.jsonl", rank=3)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(RunError, match=r"^rank 3: .*j\.jsonl cannot be written: No space left on device; "):
        journal.write("step")
    monkeypatch.undo()
    journal.close()


class Disk:
    """Has room for so many bytes more; None: for all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, content: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, content)
        written = self._write(descriptor, content[: self.room]) if self.room else 0
        self.room -= written
        if not written:
            raise OSError(28, "No space left on device")
        return written


@pytest.mark.parametrize("room", [0, 1, 30, 39, 40, 41, 60, 79, 80])
def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    disk, warned = Disk(monkeypatch), list[str]()
    journal = Journal(tmp_path / "j.jsonl", rank=3, warn=warned.append)
    disk.room = room  # each of the lines has 40 bytes
    journal.append([{"t": 1.5, "event": "step", "step": number} for number in (11, 12)])
    journal.write("step", step=13, t=1.5)
    with pytest.raises(RunError, match=r"^lines of .*j\.jsonl cannot be written: No space left on device; "):
        journal.flush()
    (line,) = warned
    assert line.startswith("rank 3: ") and "held back" in line and "j.jsonl cannot be written: No space left" in line
    disk.room = None
    other = Journal(journal.path)  # the supervisor's
    other.write("verdict", kind="slow_rank")
    other.close()
    journal.write("step", step=14, t=1.5)
    journal.flush()
    journal.close()
    found = [json.loads(one) for one in journal.path.read_text().splitlines() if one.endswith("}")]
    assert [one["step"] for one in found if one["event"] == "step"] == [11, 12, 13, 14]
    assert [one["kind"] for one in found if one["event"] == "verdict"] == ["slow_rank", "journal"]
    assert found[-1]["what"].endswith("its lines were held back, and none is lost") and len(warned) == 1


def test_what_is_held_back_is_bounded_and_what_is_lost_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "HELD_BYTES", 200)
    disk, warned = Disk(monkeypatch), list[str]()
    journal = Journal(tmp_path / "j.jsonl", warn=warned.append)
    disk.room = 5
    for number in range(10, 20):
        journal.write("step", step=number, t=1.5)
    disk.room = None
    journal.flush()
    *steps, told = [json.loads(one) for one in journal.path.read_text().splitlines()[1:]]
    assert [one["step"] for one in steps] == [10, 17, 18, 19]
    assert "6 of them are lost" in told["what"] and len(warned) == 2 and "6 of them are lost" in warned[1]
    disk.room = 0
    journal.write("end", t=1.5)
    journal.write("end", t=1.5)
    journal.close()
    assert warned[2:] == [f"the last 2 lines of {journal.path} are lost: No space left on device"]


def test_a_torn_line_is_left_alone_on_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text('{"t": 2.0, "ev')
    disk = Disk(monkeypatch)
    disk.room = 0
    journal = Journal(path, warn=lambda line: None)
    journal.write("start", t=1.0)
    disk.room = None
    journal.flush()
    journal.close()
    assert path.read_text().splitlines()[:2] == ['{"t": 2.0, "ev', '{"t": 1.0, "event": "start"}']


def test_a_line_after_the_end_is_an_error_and_no_full_disk(tmp_path: Path) -> None:
    warned = list[str]()
    journal = Journal(tmp_path / "j.jsonl", warn=warned.append)
    journal.write("end")
    journal.close()
    with pytest.raises(ValueError, match=r"j\.jsonl is closed"):
        journal.write("step")
    with pytest.raises(ValueError, match=r"j\.jsonl is closed"):
        journal.flush()
    assert not warned and len(read(journal.path)) == 1


def test_a_place_that_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written"):
        Journal(tmp_path / "file" / "j.jsonl")


def test_who_still_has_a_journal_open_that_was_taken_over_appends_where_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "rank-00000.jsonl"
    take_over(path)
    assert not path.exists()
    old = Journal(path)
    old.write("end", reason="kept")
    take_over(path)
    old.write("end", reason="lost")
    assert [json.loads(line)["reason"] for line in path.read_text().splitlines()] == ["kept"]
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    old.close()


def test_a_link_in_its_place_leads_to_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "j.jsonl").symlink_to("notes")
    with pytest.raises(RunError, match=r"j\.jsonl cannot be written: Too many levels of symbolic links"):
        Journal(tmp_path / "j.jsonl")
    assert (tmp_path / "notes").read_text() == "mine"
