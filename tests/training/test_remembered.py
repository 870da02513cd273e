"""What a planned run took is kept for this machine's next plan, whose prediction is then nearer."""

import json
import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from allranks.cli.main import main
from allranks.planning.corrections import MIN_STEPS, MOST, read_rows
from allranks.planning.this_machine import corrections_path
from allranks.reporting.predicted import Figure
from allranks.reporting.report import Report, report
from allranks.run import Run
from allranks.training.remembered import remember_run
from tests.commands import POINTS


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)


def train(folder: str) -> Run:
    words = ["train", POINTS, "train.global_batch=8", f"train.steps={MIN_STEPS}", "--device", "cpu", "--run", folder]
    assert main(words) == 0
    return Run.open(Path(folder))


def predicted_step(found: Report) -> Figure:
    assert found.predicted is not None and found.predicted.step_seconds is not None
    return found.predicted.step_seconds


def ratio(found: Report) -> float:
    measured = predicted_step(found).ratio
    assert measured is not None
    return measured


def loading_seconds(run: str) -> float:
    seconds: float = json.loads(Run.open(Path(run)).plan_path.read_text())["best"]["seconds_by_cause"].get("input", 0.0)
    return seconds


def work_ratio(found: Report, run: str) -> float:
    """Of the step without what its own thread loads before it works."""
    step, loads = predicted_step(found), loading_seconds(run)
    assert step.measured is not None
    return (step.measured - loads) / (step.expected - loads)


@pytest.mark.full
def test_the_second_prediction_is_nearer_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    first = report(train("first"))
    said = capfd.readouterr().out
    (row,) = read_rows(corrections_path())[0]
    assert f"{row.family} took {row.seconds_ratio:.2f}x the calculated step" in said
    assert row.seconds_ratio == pytest.approx(work_ratio(first, "first")) and row.context_bytes is not None
    second = report(train("second"))
    assert f"on this machine were measured {row.family} {row.seconds_ratio:.2f}x the prediction in 1 run" in (
        capfd.readouterr().out
    )
    # Beside one measured step: another one takes as long as other programs let it.
    old, new = predicted_step(first), predicted_step(second)
    assert old.measured is not None
    assert abs(math.log(old.measured / new.expected)) < abs(math.log(old.measured / old.expected))
    works = [found.expected - loading_seconds(name) for found, name in ((old, "first"), (new, "second"))]
    assert works[1] == pytest.approx(works[0] * min(MOST, max(1 / MOST, row.seconds_ratio)))
    best = json.loads(Run.open(Path("second")).plan_path.read_text())["best"]
    rows = read_rows(corrections_path())[0]
    # What is kept is over the calculation, not over what was corrected already.
    kept = pytest.approx(work_ratio(second, "second") * best["correction"])
    assert rows[-1].seconds_ratio == kept and best["correction"] != 1.0
    _one_run_counts_once_and_others_never(first, second)


def _one_run_counts_once_and_others_never(first: Report, second: Report) -> None:
    """On the runs that were made above, because they cost seconds."""
    run, path = Run.open(Path("first")), corrections_path()
    before = read_rows(path)[0]
    assert remember_run(run, first) and len(read_rows(path)[0]) == len(before)
    path.unlink()
    short, predicted = replace(first, step=MIN_STEPS - 1), first.predicted
    assert predicted is not None
    changed = replace(first, predicted=replace(predicted, differs="layout tp=2 -> dp_replicate=2"))
    mixed = replace(first, attempts=(replace(first.attempts[0], world_size=4), *first.attempts))
    for other in (short, changed, mixed, replace(first, predicted=None)):
        assert remember_run(run, other) == () and not path.exists()
    document = json.loads(run.plan_path.read_text())
    for machine in ("", "another-machine-64cores/0123456789ab", None):
        run.plan_path.write_text(json.dumps({**document, "machine": machine}))
        assert remember_run(run, first) == () and not path.exists()
    run.plan_path.write_text(json.dumps(document))
    _a_step_that_waits_for_samples_says_nothing_of_its_work(run, first)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"schema": 1, "ro')
    lines = remember_run(run, first)
    assert "begun anew, because" in lines[0] and len(read_rows(path)[0]) == 1
    path.unlink()
    path.mkdir()
    (line,) = remember_run(run, second)
    assert "cannot be written" in line


def _a_step_that_waits_for_samples_says_nothing_of_its_work(run: Run, found: Report) -> None:
    """Loaded by worker processes, or all of the step; a small part that the loop's own thread loads is taken off."""
    document, config = json.loads(run.plan_path.read_text()), run.config()
    step, path = predicted_step(found), corrections_path()
    assert step.measured is not None
    least = min(step.measured, step.expected)
    for waits, workers, learns in ((least / 2, 0, True), (least / 2, 1, False), (2 * least, 0, False)):
        causes = {**document["best"]["seconds_by_cause"], "input": waits}
        run.plan_path.write_text(json.dumps({**document, "best": {**document["best"], "seconds_by_cause": causes}}))
        data = config.data.model_copy(update={"workers": workers})
        with patch.object(Run, "config", return_value=config.model_copy(update={"data": data})):
            assert bool(remember_run(run, found)) == learns
        if learns:
            (row,) = read_rows(path)[0]
            assert row.seconds_ratio == pytest.approx((step.measured - waits) / (step.expected - waits))
            path.unlink()
    run.plan_path.write_text(json.dumps(document))
