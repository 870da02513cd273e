"""Journals as they are read back, whatever a crash has left of them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from allranks.errors import RunError
from allranks.journal_events import last_step, latest_steps, read_events


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.jsonl"


def write(journal: Path, *lines: dict[str, Any] | str) -> None:
    journal.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, **more}


def test_torn_lines_and_what_is_no_event_are_left_out(journal: Path) -> None:
    assert read_events(journal) == []
    write(
        journal, {"event": "start"}, '{"ev\n', "[1]\n", '{"t": 1}\n', '{"event": "step", "loss": NaN}\n', step(1), '{"e'
    )
    assert [event["event"] for event in read_events(journal)] == ["start", "step"]
    journal.write_bytes(journal.read_bytes() + b"\xff\xfe\n" + json.dumps(step(2)).encode())
    assert len(read_events(journal)) == 3
    write(journal, step(1), "[" * 100_000 + "\n", '{"event": ' + "[" * 100_000 + "\n", '{"event": ["step"]}\n', step(2))
    assert [event["step"] for event in read_events(journal)] == [1, 2] and last_step(journal) == 2


def test_a_redone_step_stands_once_and_what_was_not_redone_is_gone() -> None:
    steps = [step(number, loss=number) for number in (1, 2, 3, 4, 5)]
    resumed = {"event": "resume", "step": 3}
    assert [one["loss"] for one in latest_steps([*steps, resumed, step(4, loss=40)])] == [1, 2, 3, 40]
    assert [one["step"] for one in latest_steps([*steps, resumed])] == [1, 2, 3]
    assert [one["loss"] for one in latest_steps([*steps, step(3, loss=30)])] == [1, 2, 30]
    assert latest_steps([{"event": "step", "step": "1"}, {"event": "resume"}]) == []


def test_the_last_step_is_found_in_the_tail(journal: Path) -> None:
    assert last_step(journal) == 0
    write(
        journal, *(step(number, pad="x" * 300) for number in range(1, 400)), {"event": "end"}, '{"event": "step", "st'
    )
    assert journal.stat().st_size > 1 << 16 and last_step(journal) == 399
    write(journal, {"event": "start"})
    assert last_step(journal) == 0


def test_what_is_no_journal_is_refused_and_not_waited_for(journal: Path) -> None:
    os.mkfifo(journal)
    for read in (read_events, last_step):
        with pytest.raises(RunError, match="no ordinary file; restore it or move it away"):
            read(journal)
