"""`allranks explain`: as text, as one document, and when nothing is recognised."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.config import Config
from allranks.run import Run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "a.log"
    path.write_text("hello\n  exitcode  : -7 (pid: 3312)\n")
    return path


def test_as_text(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log)]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("E5: a worker touched memory") and "  next: look at `df -h /dev/shm`" in out
    assert f"{log}:2: exitcode  : -7" in out


def test_as_a_document(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in document["verdicts"]] == ["E5"]


def test_nothing_recognised_is_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.log"
    path.write_text("all is well\n")
    assert main(["explain", str(path)]) == 3
    assert "nothing in it that allranks knows" in capsys.readouterr().out
    assert main(["explain", str(path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdicts"] == []


def test_a_run_that_broke_off_is_explained_and_one_that_is_done_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path, "Digits", Config(), {"task": "digits.py:Digits"})
    assert main(["explain", str(run.path)]) == 0
    assert "crashed: no process ever started here" in capsys.readouterr().out
    start = json.dumps({"t": 1.0, "event": "start", "attempt": 0})
    run.journal().write_text(f"{start}\n{json.dumps({'t': 2.0, 'event': 'end', 'reason': 'done'})}\n")
    assert main(["explain", str(run.path)]) == 3
    assert "the run is done: every step was made" in capsys.readouterr().out


def test_nothing_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "x")]) == 2
    assert "no such file or directory" in capsys.readouterr().err
