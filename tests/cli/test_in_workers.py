"""A run in processes of this host: what they are given, and what is told of their end."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allranks.checkpointing.going_on import note_going_on
from allranks.cli.in_workers import train_in_workers
from allranks.config import resolve_config
from allranks.config_guard import GuardConfig
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving import agent
from allranks.surviving.outcome import Outcome
from allranks.verdict import Decision


def test_workers_get_the_run_and_why_and_the_end_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all paths whole: a worker may look from another folder."""
    monkeypatch.chdir(tmp_path)
    config = resolve_config(task_defaults={}, toml=None, overrides=("train.steps=3",), layout=None)
    run, seen = Run.create(Path("runs"), "points", config, {"task": "x.py"}), dict[str, Any]()

    def run_workers(entry: str, arguments: tuple[Any, ...], **more: Any) -> Outcome:
        seen.update(more, entry=entry, assignment=arguments[0])
        return Outcome(75)

    monkeypatch.setattr(agent, "run_workers", run_workers)
    decision = Decision("2 processes", "so")
    supervision: Any = SimpleNamespace(guard=GuardConfig(stop_seconds=7.0))
    code, document = train_in_workers(TrainRequest(), run, 2, [decision], supervision)

    assert (code, document["reason"], document["run"]) == (75, "terminated", str(run.path.resolve()))
    assert (seen["entry"], seen["nproc"], seen["run_id"]) == ("allranks.training.worker:work", 2, run.id)
    assert (seen["supervision"], seen["company"], seen["stop_grace_seconds"]) == (supervision, None, 7.0)
    assignment = seen["assignment"]
    assert 0 < assignment.began < time.monotonic()
    assert assignment.memory is None and not assignment.peers
    assert assignment.run.is_absolute() and assignment.run == run.path.resolve()
    assert assignment.decisions[0] == decision and "start from" in assignment.decisions[1].what
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("noted", [True, False])
def test_hosts_look_together_at_what_they_have_whatever_this_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool, noted: bool
) -> None:
    config = resolve_config(task_defaults={}, toml=None, overrides=(), layout=None)
    run = Run.create(tmp_path, "points", config, {"task": "x.py"}, directory=tmp_path / "run")
    run.begin_attempt()
    if noted:
        note_going_on(run)
    seen = list[bool]()

    def run_workers(entry: str, arguments: tuple[Any, ...], **more: Any) -> Outcome:
        seen.append(arguments[0].peers)
        return Outcome(75)

    monkeypatch.setattr(agent, "run_workers", run_workers)
    memory: Any = SimpleNamespace(directory=tmp_path, followed=lambda same: same, close=lambda: None)
    supervision: Any = SimpleNamespace(guard=GuardConfig())
    for company in (None, SimpleNamespace()):
        company_here: Any = company
        train_in_workers(TrainRequest(), run, 1, [], supervision, company_here, memory if here else None)
    assert seen == [False, here or noted]
