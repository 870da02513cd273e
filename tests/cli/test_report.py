"""`allranks report`: the library's report as text or as one document."""

import json
from pathlib import Path

import pytest

from allranks.cli.main import main
from allranks.config import Config
from allranks.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two steps whose worker died."""
    run = Run.create(tmp_path, "Digits", Config(), {"task": "digits.py:Digits", "allranks": "0.1.0", "torch": "2.13.0"})
    events = [
        {
            "t": 1.0,
            "event": "start",
            "rank": 0,
            "local_rank": 0,
            "world_size": 1,
            "pid": 1,
            "host": "h",
            "device": "cpu",
        },
        {"t": 2.0, "event": "step", "step": 1, "samples": 32, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "seconds": 0.5},
        {
            "t": 3.0,
            "event": "step",
            "step": 2,
            "samples": 64,
            "loss": 1.25,
            "lr": 0.1,
            "grad_norm": 1.0,
            "seconds": 0.5,
        },
    ]
    events[0] |= {"layout": "single", "attempt": 1}
    run.journal().write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_the_report_as_text(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert str(run.path) in out
    assert "Digits" in out and "Loss" in out and "1.25" in out


def test_the_report_as_one_document(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["id"], document["step"], document["samples"]) == (run.id, 2, 64)
    assert document["loss"]["last"] == 1.25


def test_what_is_no_run_is_78_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert main(["report", str(path)]) == 78
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"allranks: error: {path}") and len(err.splitlines()) == 1


def test_two_runs_are_compared(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"task": "digits.py:Digits", "allranks": "0.1.0", "torch": "2.13.0"}
    other = Run.create(tmp_path, "Digits", Config(), facts)
    other.journal().write_text(run.journal().read_text().replace("1.25", "1.5"))
    assert main(["report", str(run.path), str(other.path)]) == 0
    assert (
        "loss parts by more than 0.01 of it at step 2: 1.25 in the first, 1.5 in the second" in capsys.readouterr().out
    )
    assert main(["report", str(run.path), str(other.path), "--json"]) == 0
    (compared,) = json.loads(capsys.readouterr().out)["compared"]
    assert (compared["num_steps"], compared["partings"][0]["step"]) == (2, 2)
