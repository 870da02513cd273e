"""A plan.json in a Run directory beside what the run measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from allranks.config import resolve_config
from allranks.reporting.history import Attempt
from allranks.reporting.predicted import compare
from allranks.run import Run

BEST = {
    "layout": "dp_shard=2",
    "because": "the fastest of 3",
    "global_batch": 32,
    "micro_batch": 4,
    "micro_steps": 4,
    "precision": "float32",
    "step_seconds": {"low": 0.5, "expected": 1.0, "high": 2.0},
    "peak_bytes": {"low": 50.0, "expected": 100.0, "high": 200.0},
}
ATTEMPT = Attempt(1, 100.0, 165.0, 200, 2, "dp_shard=2", "cpu", "node-a", "done")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.global_batch=32", "train.micro_batch=4"])
    return Run.create(tmp_path, "Digits", config, {"task": "/tasks/digits.py:Digits"})


def write(run: Run, **more: object) -> None:
    best: dict[str, Any] = {**BEST, **more}
    run.plan_path.write_text(json.dumps({"cluster": "1x2:cpu", "devices": 2, "best": best}))


def test_measured_stands_beside_predicted(run: Run) -> None:
    write(run)
    found = compare(run, ATTEMPT, 1.5, 80.0)
    assert found is not None and found.step_seconds is not None and found.peak_bytes is not None
    assert (found.cluster, found.layout, found.because, found.differs) == (
        "1x2:cpu", "dp_shard=2", "the fastest of 3", ""
    )  # fmt: skip
    assert (found.step_seconds.low, found.step_seconds.expected, found.step_seconds.high) == (0.5, 1.0, 2.0)
    assert (found.step_seconds.measured, found.step_seconds.ratio) == (1.5, 1.5)
    assert (found.peak_bytes.measured, found.peak_bytes.ratio) == (80.0, 0.8)


def test_before_the_first_step_there_is_the_prediction_alone(run: Run) -> None:
    write(run)
    found = compare(run, None, None, None)
    assert found is not None and found.step_seconds is not None
    assert (found.step_seconds.expected, found.step_seconds.measured, found.step_seconds.ratio) == (1.0, None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "tp=2"}, "layout tp=2 -> dp_shard=2"),
        ({"global_batch": 64}, "global_batch 64 -> 32"),
        ({"micro_batch": 8}, "micro_batch 8 -> 4"),
        ({"precision": "bfloat16"}, "precision bfloat16 -> float32"),
    ],
)
def test_another_run_than_the_planned_one_is_not_compared(run: Run, change: dict[str, object], said: str) -> None:
    write(run, **change)
    found = compare(run, ATTEMPT, 1.5, 80.0)
    assert found is not None and found.differs == said
    assert found.step_seconds is not None and found.step_seconds.measured is None


def test_without_a_micro_batch_the_number_of_forwards_counts(tmp_path: Path) -> None:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.global_batch=32", "train.micro_steps=2"])
    run = Run.create(tmp_path, "Digits", config, {"task": "digits"})
    write(run)
    found = compare(run, ATTEMPT, 1.5, 80.0)
    assert found is not None and found.differs == "micro_steps 4 -> 2"


def test_on_cuda_the_tensors_are_compared(run: Run) -> None:
    write(run, bytes_by_category={"weights": 30.0, "activations": 20.0, "framework": 40.0})
    on_cuda = Attempt(1, 100.0, 165.0, 200, 2, "dp_shard=2", "cuda:0", "node-a", "done")
    found, whole = compare(run, on_cuda, 1.5, 60.0), compare(run, ATTEMPT, 1.5, 60.0)
    assert found is not None and found.peak_bytes is not None and whole is not None and whole.peak_bytes is not None
    peak = found.peak_bytes
    # 50 of tensors, 40 of the driver's, 10 spare: the low end counts what is in use, and has no spare in it.
    assert (peak.low, peak.expected, peak.high, peak.ratio) == (10.0, 50.0, 150.0, 1.2)
    assert whole.peak_bytes.expected == 100.0


def test_the_median_step_has_no_checkpoint_in_it(run: Run) -> None:
    write(run, seconds_by_cause={"compute": 0.75, "checkpoint": 0.25})
    found = compare(run, ATTEMPT, 1.5, 80.0)
    assert found is not None and found.step_seconds is not None
    step = found.step_seconds
    assert (step.low, step.expected, step.high, step.ratio) == (0.25, 0.75, 1.75, 2.0)


def test_a_plan_without_figures_predicts_nothing(run: Run) -> None:
    write(run, step_seconds=None, peak_bytes={"low": -1, "expected": 1, "high": "x"})
    found = compare(run, ATTEMPT, 1.5, 80.0)
    assert found is not None and (found.step_seconds, found.peak_bytes) == (None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"best": null}', '{"best": {"layout": 3}}'])
def test_what_is_no_plan_is_none(run: Run, text: str) -> None:
    assert compare(run, ATTEMPT, 1.0, 1.0) is None
    run.plan_path.write_text(text)
    assert compare(run, ATTEMPT, 1.0, 1.0) is None
