"""What rank 0 shows."""

from pathlib import Path

import pytest

from allranks.run import Run
from allranks.training.screen import Screen
from allranks.training.trainer import Ending
from tests.training.runs import start
from tests.training.tasks import Curve


class Told(Curve):
    """Has something to say at the end."""

    def summary(self, model: object) -> str:
        """What was loaded."""
        return f"trained a {type(model).__name__}"


def test_lines_go_to_standard_output_and_with_json_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(json=False).say("to [bold]out[/bold]")
    Screen(json=True).say("to err")
    Screen(json=True).warn("it is late")
    shown = capsys.readouterr()
    assert shown.out == "to [bold]out[/bold]\n"
    assert shown.err == "to err\nwarning: it is late\n"


def test_the_banner_and_the_closing_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("Curve", tmp_path / "run", "train.steps=3") == 0
    shown = capsys.readouterr().out
    for words in ("Decided:", "because", "global batch", "The run lies in", "Where the time went", "allranks.load("):
        assert words in shown


def test_the_task_sums_up_a_run_that_is_done_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start("Curve", tmp_path / "run", "train.steps=2")
    run = Run.open(tmp_path / "run")
    capsys.readouterr()
    Screen(json=False).close_run(run, Told(), Ending("interrupted", 2, {}))
    assert "trained a" not in capsys.readouterr().out
    Screen(json=False).close_run(run, Told(), Ending("done", 2, {}))
    assert "trained a" in capsys.readouterr().out
