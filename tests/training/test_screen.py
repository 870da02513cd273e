"""What rank 0 shows: a banner, lines on the way, and the end of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training.load import load
from allranks.training.prepare import open_run, prepare
from allranks.training.screen import Screen, step_shape
from allranks.training.trainer import Ending
from allranks.verdict import Decision
from tests.distributed.sessions import config_of, session_of
from tests.training.runs import TASKS, start
from tests.training.tasks import Curve, Streamed

Capture = pytest.CaptureFixture[str]


class Summing(Curve):
    """Has something to say of the trained model."""

    def summary(self, model: torch.nn.Module) -> str:
        weight = sum(float(parameter.detach().abs().sum()) for parameter in model.parameters())
        return f"the weights sum to {weight:.3f}, [bold]in {'training' if model.training else 'evaluation'} mode[/bold]"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that has ended."""
    assert start("Curve", tmp_path / "run", "train.steps=2") == 0
    return Run.open(tmp_path / "run")


def test_with_json_nothing_reaches_standard_output(run: Run, capsys: Capture) -> None:
    session = session_of(Curve(), config_of("single"))
    capsys.readouterr()
    for json in (True, False):
        screen = Screen(json=json)
        screen.say("a line with [brackets] and x[:100:2]")
        screen.warn("mind this[/b]:x:")
        screen.open_run(run, session, session.decisions)
        screen.close_run(run, Curve(), Ending("done", 2, {}))
        shown = capsys.readouterr()
        text, nothing = (shown.err, shown.out) if json else (shown.out, shown.err)
        assert nothing == ""
        assert "a line with [brackets] and x[:100:2]" in text and "warning: mind this[/b]:x:" in text
        assert f"lies in {run.path}" in text


def test_every_decision_is_shown_with_because(run: Run, capsys: Capture) -> None:
    session = session_of(Curve(), config_of("single"))
    Screen(json=False).open_run(run, session, [Decision("layout ddp", "it is the default")])
    assert "layout ddp, because it is the default" in capsys.readouterr().out


def test_the_summary_is_of_what_was_saved_and_only_at_the_end(run: Run, capsys: Capture) -> None:
    screen = Screen(json=False)
    capsys.readouterr()
    screen.close_run(run, Summing(), Ending("interrupted", 2, {}))
    assert "the weights sum" not in capsys.readouterr().out
    screen.close_run(run, Summing(), Ending("done", 2, {}))
    shown = capsys.readouterr().out
    assert "[bold]in evaluation mode[/bold]" in shown and "allranks report" in shown
    assert shown.index("the weights sum") < shown.index("done, every step was made")


def test_the_summary_is_of_the_average_where_there_is_one(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "averaged"
    assert start("Curve", path, "train.steps=2", "train.ema=0.5") == 0
    capsys.readouterr()
    Screen(json=False).close_run(Run.open(path), Summing(), Ending("done", 2, {}))
    shown = capsys.readouterr().out
    sums = [Summing().summary(load(path, ema=ema)) for ema in (True, False)]  # type: ignore[arg-type]
    assert sums[0].splitlines()[0] in shown and sums[1].splitlines()[0] not in shown


def shape_of(task: Any, num_ranks: int, *overrides: str) -> Any:
    return step_shape(session_of(task, config_of("single", *overrides)), num_ranks)


def test_one_step_as_many_processes_cut_it() -> None:
    settings = ("train.global_batch=11", "train.micro_batch=2", "schedule.name=linear", "schedule.warmup=1")
    one, four = (shape_of(Curve(num_points=47), ranks, *settings) for ranks in (1, 4))
    assert (one.device_batch, one.micro_steps, one.num_processes) == ((11, 11), 6, 1)
    assert (four.device_batch, four.micro_steps, four.num_processes) == ((2, 3), 2, 4)
    alike = {"num_processes": 1, "device_batch": (11, 11), "micro_steps": 6}
    assert replace(four, **alike) == one, "nothing else depends on the number of processes"
    assert (one.steps_per_epoch, one.total_steps) == (5, 3)
    assert one.schedule == "linear, 0.001 at the top, 11 samples of warmup, to 0 of it at sample 33"


def test_what_nobody_knows_is_not_shown() -> None:
    shape = shape_of(Streamed(), 1, "train.global_batch=5")
    assert (shape.steps_per_epoch, shape.total_steps, shape.schedule) == (None, 3, "constant, 0.001 at the top")


def test_a_screen_of_a_run_that_another_process_made(tmp_path: Path, capsys: Capture) -> None:
    """A Run without any step: there is no model to sum up, and nothing fails."""
    request = TrainRequest(task_spec=f"{TASKS}:Curve", run=tmp_path / "new")
    made = open_run(prepare(request), request)
    made.release()
    Screen(json=False).close_run(made, Curve(), Ending("interrupted", 0, {}))
    assert "no process ever started here" in capsys.readouterr().out
