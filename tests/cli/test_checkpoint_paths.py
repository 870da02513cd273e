"""Which directory DIR means, and the line where it means none."""

from pathlib import Path

import pytest

from allranks.cli.checkpoint_paths import find_checkpoints, find_newest, find_passed_over
from allranks.errors import CheckpointError, RunError


def test_a_step_directory_is_itself(tmp_path: Path) -> None:
    step = tmp_path / "step-00000003"
    step.mkdir()
    assert find_checkpoints(step) == [step] and find_newest(step) == step


@pytest.mark.parametrize("name", ["step-size-sweep", "step-00000003"])
def test_a_run_may_be_called_like_a_checkpoint(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name / "checkpoints"
    for step in (1, 2):
        (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / "step-00000001" / "COMMITTED").touch()
    (tmp_path / name / "run.json").write_text("{}")
    assert find_newest(tmp_path / name) == folder / "step-00000001"
    assert list(find_passed_over(tmp_path / name)) == [folder / "step-00000002"]


def test_a_folder_of_checkpoints_may_be_called_almost_like_one(tmp_path: Path) -> None:
    folder = tmp_path / "step-sweep"
    (folder / "step-00000001").mkdir(parents=True)
    (folder / "step-00000001" / "COMMITTED").touch()
    assert find_checkpoints(folder) == [folder / "step-00000001"]


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


def test_what_has_only_the_name_of_a_checkpoint_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert find_passed_over(tmp_path) == {}
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}").mkdir(parents=True)
    (folder / "step-00000001" / "COMMITTED").touch()
    (folder / "step-00000003.tmp-t_1").mkdir()
    (folder / "step-00000004").symlink_to(folder / "step-00000001")
    (folder / "step-00000005").symlink_to(folder / "nowhere")
    (folder / "step-00000006").touch()
    told = {path.name: reason for path, reason in find_passed_over(tmp_path).items()}
    uncommitted = "is not committed (it has no COMMITTED file); passed over"
    link = "is a symbolic link, no directory; passed over"
    assert told == {
        "step-00000002": uncommitted,
        "step-00000003": uncommitted,
        "step-00000004": link,
        "step-00000005": link,
        "step-00000006": "is a file, no directory; passed over",
    }
    assert find_passed_over(folder).keys() == find_passed_over(tmp_path).keys()
    assert find_passed_over(folder / "step-00000002") == {}, "it was named: the command itself says what it is"
