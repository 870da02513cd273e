"""A Run directory in which nothing was done is begun anew; one that holds anything never is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allranks.config import Config, resolve_config
from allranks.errors import RunError
from allranks.observing.journal import Journal
from allranks.run import Run
from allranks.training.anew import begin_anew, explain_anew, holds_nothing

FACTS = {"task": "/tasks/other.py"}


def config(*overrides: str) -> Config:
    return resolve_config(task_defaults={}, toml=None, overrides=["train.steps=9", *overrides])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose workers have refused before the first step."""
    made = Run.create(tmp_path, "digits", config(), {"task": "/tasks/digits.py"}, directory=tmp_path / "run")
    made.begin_attempt()
    for rank in (0, 1):
        note(made, "start", rank=rank)
        note(made, "end", rank=rank, reason="failed", error="DataError: too small")
        made.log(rank).write_text("DataError: too small")
    (made.path / "logs" / "failure-00001.json").write_text("{}")
    (made.path / "notes.txt").write_text("mine")
    return made


def note(run: Run, event: str, *, rank: int = 0, **fields: Any) -> None:
    journal = Journal(run.journal(rank), rank)
    journal.write(event, **fields)
    journal.close()


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_it_becomes_another_run_at_the_same_path(run: Run) -> None:
    old = Run.open(run.path)
    assert holds_nothing(old)
    begin_anew(old, "other", config("train.global_batch=8"), FACTS)
    now = Run.open(run.path)
    assert old.identity == now.identity and now.id != run.id
    assert (now.task, now.name, now.attempts, now.ranks()) == ("/tasks/other.py", "other", 0, [])
    assert now.config().train.global_batch == 8 and now.holder() is not None
    old.release()
    assert sorted(contents(run.path)) == ["config.toml", "lease", "notes.txt", "run.json"]
    assert now.begin_attempt() == 1


HOLDINGS: dict[str, Callable[[Run], Any]] = {
    "a step": lambda run: note(run, "step", step=1),
    "a step of another rank": lambda run: note(run, "step", rank=1, step=1),
    "a checkpoint": lambda run: (run.checkpoints / "step-00000001").mkdir(),
    "half a checkpoint": lambda run: (run.checkpoints / "step-00000001.tmp-ab").mkdir(),
    "another id": lambda run: run.replace_identity("digits", {"task": run.task}),
}


@pytest.mark.parametrize("what", HOLDINGS)
def test_what_came_since_it_was_looked_at_is_not_touched(run: Run, what: str) -> None:
    seen = Run.open(run.path)
    HOLDINGS[what](run)
    before = contents(run.path)
    assert holds_nothing(seen) == (what == "another id")
    with pytest.raises(RunError, match="used by another process meanwhile"):
        begin_anew(seen, "other", config(), FACTS)
    assert contents(run.path) == before | {"lease": b""} and run.holder() is None


def test_a_journal_that_cannot_be_read_may_hold_anything(run: Run) -> None:
    run.journal(1).unlink()
    run.journal(1).mkdir()
    assert not holds_nothing(run)


def test_somebody_who_is_still_there_is_left_alone(run: Run) -> None:
    run.acquire()
    before = contents(run.path)
    with pytest.raises(RunError, match="in use by pid"):
        begin_anew(Run.open(run.path), "other", config(), FACTS)
    assert contents(run.path) == before
    run.release()


def test_it_is_said_with_what_differs(run: Run) -> None:
    decision = explain_anew(run, "/tasks/other.py", config("train.global_batch=8"))
    assert str(run.path) in decision.what and "anew" in decision.what
    assert decision.because.endswith("task /tasks/digits.py -> /tasks/other.py, train.global_batch 32 -> 8")
    assert "task" not in explain_anew(run, run.task, config("train.seed=1")).because
