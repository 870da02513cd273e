"""The worker as a whole: what it writes, and what it refuses."""

from pathlib import Path

import pytest

from allranks.errors import TaskError
from allranks.run import Run
from tests.distributed.pool import Pools
from tests.training.runs import start, train, train_outside


def test_a_worker_tells_its_start_its_decisions_and_its_end(tmp_path: Path) -> None:
    assert start("Curve", tmp_path / "run", "train.steps=3") == 0
    events = Run.open(tmp_path / "run").events()
    first, last = events[0], events[-1]
    assert first["event"] == "start"
    assert (first["rank"], first["local_rank"], first["world_size"], first["attempt"]) == (0, 0, 1, 1)
    assert {"pid", "host", "device", "layout"} <= first.keys()
    assert last["event"] == "end" and last["reason"] == "done" and last["seconds"]["forward_backward"] > 0
    decisions = [event for event in events if event["event"] == "decision"]
    assert decisions and all(event["what"] and event["because"] for event in decisions)
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]


def test_a_resumed_worker_says_where_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=3") == 0
    assert train(None, "train.steps=5", resume=run) == 0
    events = Run.open(run).events()
    (resumed,) = [event for event in events if event["event"] == "resume"]
    assert (resumed["step"], resumed["samples"]) == (3, 30)
    assert [event["attempt"] for event in events if event["event"] == "start"] == [1, 2]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5]


def test_an_error_is_in_the_journal_before_it_is_raised(tmp_path: Path) -> None:
    with pytest.raises(TaskError):
        start("Broken", tmp_path / "run", "train.steps=3", "task.wrong=mean")
    last = Run.open(tmp_path / "run").events()[-1]
    assert last["event"] == "end" and last["reason"] == "failed" and last["error"].startswith("TaskError")


def test_outside_the_command_rank_0_makes_the_run_for_all(tmp_path: Path, pool: Pools) -> None:
    run = tmp_path / "run"
    steps = ("train.steps=4", "train.global_batch=10", "track.tensorboard=false")
    assert train_outside(pool, 2, "Curve", *steps, run=run) == [0, 0]
    opened = Run.open(run)
    assert opened.ranks() == [0, 1] and opened.attempts == 1


def test_what_rank_0_refuses_every_rank_refuses(tmp_path: Path, pool: Pools) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").write_text("else")
    answers = train_outside(pool, 2, "Curve", "train.steps=4", run=tmp_path / "run")
    assert all(isinstance(answer, str) and answer.startswith("RunError") for answer in answers)
