"""examples/digits learns: over 95% of images that it never saw, whatever the number of processes."""

from pathlib import Path

import pytest

from tests.examples.commands import EXAMPLES, last, train

NUM_VALIDATION = 360


@pytest.mark.full
@pytest.mark.distributed
def test_digits_on_two_processes(tmp_path: Path) -> None:
    events = train(str(EXAMPLES / "digits" / "task.py"), "--layout", "ddp", "--nproc", "2", folder=tmp_path)
    accuracy = last(events, "evaluation")["metrics"]["accuracy"]
    assert 0.95 < accuracy <= 1.0
    assert accuracy * NUM_VALIDATION == pytest.approx(round(accuracy * NUM_VALIDATION), abs=1e-6)  # each image once
    losses = [entry["loss"] for entry in events if entry["event"] == "step"]
    assert len(losses) == -(-20 * 1437 // 32)
    assert losses[-1] < 0.2 < losses[0]


@pytest.mark.full
def test_digits_in_one_process_with_settings(tmp_path: Path) -> None:
    task = str(EXAMPLES / "digits" / "task.py")
    events = train(f"{task}:Digits", "--layout", "single", "task.width=32", "train.epochs=3", folder=tmp_path)
    assert last(events, "step")["step"] == -(-3 * 1437 // 32)
    assert last(events, "evaluation")["metrics"]["accuracy"] > 0.85
