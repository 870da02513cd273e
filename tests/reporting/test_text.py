"""The report as a person reads it."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.reporting.history import Attempt, LossCurve
from allranks.reporting.predicted import Figure, Prediction
from allranks.reporting.report import KeptCheckpoint, Report
from allranks.reporting.text import render_next, render_text
from allranks.verdict import Decision, Verdict

REPORT = Report(
    path="/runs/20260101-120000-Digits-a3f9",
    id="a3f9000000000000",
    name="Digits",
    task="/tasks/digits.py:Digits",
    created="2026-01-01T12:00:00+00:00",
    state="done",
    because="every step was made",
    attempts=(Attempt(1, 100.0, 165.0, 200, 2, "dp_replicate=2", "cpu", "node-a", "done"),),
    step=200,
    total_steps=200,
    samples=6400,
    loss=LossCurve(4.0, 1.0, 0.5, 150, 1, ((50, 4.0), (100, 2.5), (150, 0.5), (200, float("nan")))),
    validation_step=200,
    validation={"accuracy": 0.9731, "loss": 1.25},
    step_seconds=0.025,
    samples_per_second=1280.0,
    seconds_by_cause={"input": 10.0, "forward_backward": 30.0, "evaluation": 0.0},
    seconds_unsplit=0.0,
    memory_bytes={0: 413_000_000, 1: 398_000_000},
    checkpoints=(KeptCheckpoint("step-00000200", 200, True, 4_500_000),),
    decisions=(Decision("backend gloo", "there is no CUDA device " * 8),),
    verdicts=(Verdict("S1", "rank 1 is slow", ("it took 3 s",), "look at node-b"),),
    error=None,
    rate_spent=False,
)


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)


def test_the_whole_report() -> None:
    text = render_text(REPORT)
    for expected in (
        "Digits a3f9: done, every step was made\n",
        "run      /runs/20260101-120000-Digits-a3f9\n",
        "1 min 05 s in 1 attempt\n",
        "layout   dp_replicate=2: 2 processes on cpu, node-a\n",
        "steps    200 of 200, 6.4k samples\n",
        "pace     25.0 ms a step, 1.3k samples/s (medians)\n",
        "training    █▅▁x\n",
        "4.0000 -> 1.0000, lowest 0.5000 at step 150\n",
        "1 step with a loss that is no finite number\n",
        "validation  accuracy 0.9731  loss 1.2500  (step 200)\n",
        "forward + backward  30.0 s  75%  ━",
        "input               10.0 s  25%  ━",
        "rank 0  413.0 MB\n",
        "step-00000200  4.5 MB\n",
        "- rank 1 is slow\n",
        "it took 3 s\n",
        "next: look at node-b\n",
    ):
        assert expected in text, expected
    assert "evaluation" not in text
    assert "Error" not in text
    assert max(map(len, text.splitlines())) <= 96
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_paths_and_commands_are_never_broken_or_marked_up() -> None:
    path = "/home/" + "very-long-[bold]-name/" * 8 + "run"
    text = render_text(replace(REPORT, path=path), width=60)
    assert f"  allranks train --resume {path} train.steps=400\n" in text
    assert f'model = allranks.load("{path}")' in text


def test_what_is_next_depends_on_the_state() -> None:
    assert "train --resume /runs/20260101-120000-Digits-a3f9\n" in render_next(replace(REPORT, state="crashed"))
    bare = replace(REPORT, checkpoints=(KeptCheckpoint("step-1.tmp-a", 1, False, 0),))
    assert "--resume" not in render_next(bare)
    assert "start again" in render_next(bare)
    assert "start again" not in render_next(replace(bare, state="running"))


def test_a_loop_of_ones_own_is_started_again_as_it_was() -> None:
    """No command starts it, and it names no Task to load."""
    own = replace(REPORT, task="/x/train.py (own loop)")
    text = render_next(own)
    assert "--resume" not in text and "allranks.load" not in text
    assert f"  allranks checkpoint export {own.path} model.safetensors\n" in text
    assert f'  start /x/train.py again with join(run="{own.path}")\n' in text
    assert "start again" in render_next(replace(own, checkpoints=()))


def test_an_error_keeps_its_words() -> None:
    text = render_text(replace(REPORT, state="crashed", error="rank 1: ValueError: [red]bad[/red]"))
    assert "\nError\n  - rank 1: ValueError: [red]bad[/red]\n" in text


def test_many_ranks_are_summed_up() -> None:
    text = render_text(replace(REPORT, memory_bytes={rank: 1000 * (rank + 1) for rank in range(64)}))
    assert "64 ranks  median 32.5 kB, most 64.0 kB (rank 63)\n" in text


def test_an_empty_report_says_that_it_never_stepped() -> None:
    nothing = replace(REPORT, step=0, loss=None, attempts=(), step_seconds=None, memory_bytes={}, decisions=())
    text = render_text(replace(nothing, seconds_by_cause={}, verdicts=(), checkpoints=()))
    assert "none: it ended before the first step" in text
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "Digits a3f9: done, every step was made",
        "Next",
    ]


def test_a_curve_without_a_slope_is_drawn() -> None:
    flat = LossCurve(1.0, 1.0, 1.0, 1, 0, ((1, 1.0), (2, 1.0)))
    assert "training    ▁▁\n" in render_text(replace(REPORT, loss=flat))


def test_a_run_whose_rate_has_come_down_is_continued_with_a_new_schedule() -> None:
    longer = "train.steps=400 schedule.steps=400 --change schedule.steps\n"
    assert longer in render_next(replace(REPORT, rate_spent=True))
    assert "schedule.steps" not in render_next(replace(REPORT, rate_spent=True, state="stopped"))


def test_commands_can_be_copied_where_the_programs_are_not_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("allranks", "tensorboard", "python"):
        (programs / name).touch()
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    text = render_next(REPORT)
    assert "  .venv/bin/allranks train --resume" in text and "  .venv/bin/tensorboard --logdir" in text
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert f"  {programs}/allranks report" in render_next(REPORT)


def test_predicted_stands_beside_measured() -> None:
    step = Figure(0.015, 0.02, 0.03, 0.025, 1.25)
    peak = Figure(3e8, 4e8, 5e8, None, None)
    plan = Prediction("1x2:cpu", "dp_replicate=2", "the fastest", step, peak, "")
    text = render_text(replace(REPORT, predicted=plan))
    assert "Predicted and measured" in text and "Predicted" not in render_text(REPORT)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "step 20.0 ms (15.0 ms to 30.0 ms) 25.0 ms 1.25 of the prediction" in lines
    assert "peak memory 400.0 MB (300.0 MB to 500.0 MB) not measured" in lines
    other = render_text(replace(REPORT, predicted=replace(plan, differs="layout tp=2 -> dp_replicate=2")))
    assert "not as planned, so nothing is compared: layout tp=2 -> dp_replicate=2" in other
    bare = render_text(replace(REPORT, predicted=replace(plan, step_seconds=None, peak_bytes=None)))
    assert "nothing was predicted: the fastest" in bare
