"""Which directory DIR means, and the line where it means none."""

from pathlib import Path

import pytest

from allranks.cli.checkpoint_paths import find_checkpoints, find_newest
from allranks.errors import CheckpointError, RunError


def test_a_step_directory_is_itself(tmp_path: Path) -> None:
    step = tmp_path / "step-00000003"
    step.mkdir()
    assert find_checkpoints(step) == [step] and find_newest(step) == step


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is no run and holds no checkpoint"):
        find_newest(tmp_path)
    with pytest.raises(RunError, match="no such directory"):
        find_newest(tmp_path / "none")


def test_a_run_without_a_checkpoint_has_no_newest(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        find_newest(tmp_path)
