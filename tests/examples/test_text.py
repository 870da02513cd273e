"""examples/text learns from the user's own files, and the demo task takes them too."""

import math
from pathlib import Path

import pytest

from tests.examples.commands import EXAMPLES, last, run, train

TEXT = "".join(f"On day {day} the {('cat', 'dog', 'owl')[day % 3]} sat down beside the river.\n" for day in range(900))


def write_notes(folder: Path) -> None:
    (folder / "notes" / "inner").mkdir(parents=True)
    (folder / "notes" / "one.md").write_text(TEXT)
    (folder / "notes" / "inner" / "two.md").write_text(TEXT.replace("river", "house"))


@pytest.mark.full
@pytest.mark.distributed
def test_ones_own_text(tmp_path: Path) -> None:
    write_notes(tmp_path)
    task = str(EXAMPLES / "text" / "task.py")
    events = train(task, "data.text=notes/**/*.md", "task.seq=64", "train.steps=160", "--nproc", "2", folder=tmp_path)
    metrics = last(events, "evaluation")["metrics"]
    assert 0.0 < metrics["bits_per_byte"] < 1.5
    assert metrics["loss"] / math.log(2) == pytest.approx(metrics["bits_per_byte"], rel=1e-5)
    assert next(entry["loss"] for entry in events if entry["event"] == "step") > 4.5


@pytest.mark.full
@pytest.mark.distributed
def test_the_demo_with_ones_own_text(tmp_path: Path) -> None:
    write_notes(tmp_path)
    small = ("task.num_layers=1", "task.hidden=32", "task.seq=32", "task.held_out=0.1", "train.steps=60")
    output = run("-m", "allranks", "train", "data.text=notes/**/*.md", *small, "--run", "run", folder=tmp_path)
    assert "held-out text:" in output
    assert "bits per byte; zlib -9" in output
    assert "continued by the model:" in output
