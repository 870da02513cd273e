"""Which part of a run's logs its newest attempt has, and what nobody knows."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from allranks.config import Config
from allranks.reporting.last_attempt import Part, RankLog, find_logs, find_parts
from allranks.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run in its second attempt; three ranks have a log."""
    made = Run.create(tmp_path, "Digits", Config(), {"task": "digits.py:Digits"})
    made.begin_attempt()
    made.begin_attempt()
    for rank in range(3):
        made.log(rank).write_text("step 1\n")
    return made


def write(run: Run, rank: int, *events: Mapping[str, object]) -> None:
    run.journal(rank).write_text("".join(json.dumps({"t": 1.0, **event}) + "\n" for event in events))


def start(attempt: object, log_bytes: object) -> dict[str, object]:
    return {"event": "start", "attempt": attempt, "log_bytes": log_bytes}


def test_the_newest_attempt_alone_counts(run: Run) -> None:
    end = {"event": "end", "reason": "done"}
    write(run, 0, start(1, 0), {"event": "end", "reason": "failed"}, start(2, 7), end, {"event": "verdict"})
    write(run, 1, start(1, 0), end, start(2, 5))
    write(run, 2, start(1, 0), end)
    parts = find_parts(run)
    assert parts == {0: Part(7, "done"), 1: Part(5, "")}
    assert find_logs(run, parts) == [RankLog(run.log(0), 7, True), RankLog(run.log(1), 5, True)]


@pytest.mark.parametrize("log_bytes", [None, -1, "7", 1.5, True, []])
def test_without_a_sound_number_all_is_read_and_not_held_apart(run: Run, log_bytes: object) -> None:
    write(run, 1, start(2, log_bytes))
    write(run, 2, start("x", 3))
    parts = find_parts(run)
    assert parts == {1: Part(None, "")}
    assert find_logs(run, parts) == [RankLog(run.log(1), 0, False)]


def test_where_nothing_of_the_newest_attempt_is_told_every_log_is_read(run: Run) -> None:
    write(run, 1, start(1, 3))
    assert find_parts(run) == {}
    assert find_logs(run, {}) == [RankLog(run.log(rank), 0, False) for rank in range(3)]


def test_of_one_attempt_all_is_its_own(tmp_path: Path) -> None:
    made = Run.create(tmp_path, "Digits", Config(), {"task": "digits.py:Digits"})
    made.begin_attempt()
    made.log(1).write_text("step 1\n")
    made.log(3).mkdir()
    assert find_logs(made, find_parts(made)) == [RankLog(made.log(1), 0, True)]
