"""How a run has ended, on the screen and as a document."""

from pathlib import Path

import pytest

from allranks.cli.run_ended import tell_end
from allranks.config import resolve_config
from allranks.failure import Failure
from allranks.run import Run
from allranks.surviving.outcome import Outcome

FAILURE = Failure(1, "hostb", 9, 2.5, 1, "ValueError: x", traceback="Traceback\nValueError: x")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=("train.steps=3",), layout=None)
    return Run.create(tmp_path, "points", config, {"task": "x.py"})


def test_done_says_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = tell_end(run, Outcome(0))
    assert (code, document["reason"], document["run"], document["error"]) == (0, "done", str(run.path), None)
    assert capsys.readouterr().err == ""


def test_the_first_failure_is_last_on_the_screen(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-00000002").mkdir()
    code, document = tell_end(run, Outcome(1, FAILURE, others=(0, 2)))
    assert (code, document["reason"], document["error"]) == (1, "failed", "ValueError: x")
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].endswith("goes on from its newest checkpoint.") and str(run.path) in lines[0]
    assert lines[1].startswith("After it failed rank 0, 2:")
    assert lines[2:] == ["rank 1 on hostb failed:", "Traceback", "ValueError: x"]


def test_a_path_and_a_traceback_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve_config(task_defaults={}, toml=None, overrides=("train.steps=3",), layout=None)
    run = Run.create(tmp_path, "points", config, {"task": "x.py"}, directory=tmp_path / "[lr=0.1][/b]:100:")
    (run.checkpoints / "step-00000002").mkdir()
    tell_end(run, Outcome(1, Failure(1, "hostb", 9, 2.5, 1, "x", traceback="    x[:100:2][/red]"), others=(0,)))
    told = capsys.readouterr().err
    assert f"--resume {run.path}`" in told and f"is in {run.path}/logs\n" in told and "    x[:100:2][/red]\n" in told


def test_of_a_refusal_one_line_says_all(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-00000002").mkdir()
    refused = Failure(1, "hostb", 9, 2.5, 78, "no Task file")
    assert tell_end(run, Outcome(78, refused, others=(0,)))[0] == 78
    assert capsys.readouterr().err.strip() == "rank 1 on hostb: no Task file"
