"""`allranks explain`: as text, as one document, and when nothing is recognised."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main


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


def test_nothing_there_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path / "x")]) == 2
    assert "no such file or directory" in capsys.readouterr().err
