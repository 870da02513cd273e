"""Which checkpoint of a run counts. The directories are real ones, made by a run."""

import shutil
from pathlib import Path

import pytest

from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.training.newest import newest_of_run
from tests.training.runs import damage, start


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1, 2, 3 and 4."""
    run = tmp_path_factory.mktemp("made") / "run"
    assert start("Curve", run, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", "evaluate.every=0") == 0
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def find(run: Path) -> tuple[int | None, list[str]]:
    """The step of the newest good one, and why newer ones are none."""
    checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id)
    return None if checkpoint is None else checkpoint.step, skipped


def test_the_newest_is_taken_silently(run: Path) -> None:
    (run / "checkpoints" / "step-00000009.tmp-ab12").mkdir()
    assert find(run) == (4, [])
    damage(run, 2)
    (run / "checkpoints" / "step-00000003" / "COMMITTED").unlink()
    assert find(run) == (4, []), "older ones do not matter"


def test_newer_ones_that_are_damaged_are_accounted_for(run: Path) -> None:
    damage(run, 3)
    (run / "checkpoints" / "step-00000004" / "COMMITTED").unlink()
    step, skipped = find(run)
    assert step == 2
    assert ["step-00000004" in skipped[0], "step-00000003" in skipped[1], len(skipped)] == [True, True, 2]
    assert "COMMITTED" in skipped[0]


def test_where_none_was_ever_saved_there_is_none(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    assert find(run) == (None, [])
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-00000009.tmp-ab12").mkdir()
    assert find(run) == (None, [])


def test_where_all_are_damaged_nothing_begins_anew(run: Path) -> None:
    for step in (1, 2):
        damage(run, step)
    (run / "checkpoints" / "step-00000003" / "COMMITTED").unlink()
    (run / "checkpoints" / "step-00000004" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError) as refused:
        find(run)
    message = str(refused.value)
    assert "\n" not in message and "and 1 more" in message
    assert message.index("step-00000004") < message.index("step-00000003") < message.index("step-00000002")


def test_checkpoints_of_another_run_are_no_good_ones(run: Path) -> None:
    with pytest.raises(CheckpointError, match="belongs to run"):
        newest_of_run(run / "checkpoints", "another")
