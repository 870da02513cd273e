"""What comes from another place is whole under its name, or not there at all."""

import shutil
from pathlib import Path

import pytest

from allranks.checkpointing.adopting import adopt, copy
from allranks.checkpointing.checkpoint import Checkpoint, verify_files
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import flip, save_alone


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_copy_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    source = save_alone(tmp_path / "memory", 300)
    brought = copy(source, tmp_path / "disk")
    assert brought.path == tmp_path / "disk" / "step-00000300" and contents(brought.path) == contents(source.path)
    verify_files(brought)
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-00000300"]


def test_a_damaged_one_does_not_get_the_name_and_what_had_it_stays(tmp_path: Path) -> None:
    source, before = save_alone(tmp_path / "memory"), save_alone(tmp_path / "disk")
    kept = contents(before.path)
    flip(source.path / "rank-00000.safetensors", 8000)
    with pytest.raises(CheckpointError, match="SHA-256"):
        copy(source, tmp_path / "disk")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-00000200"]
    assert contents(before.path) == kept


def test_one_takes_the_place_of_a_damaged_one(tmp_path: Path) -> None:
    source, damaged = save_alone(tmp_path / "memory"), save_alone(tmp_path / "disk")
    flip(damaged.path / "rank-00000.safetensors", 8000)
    verify_files(copy(source, tmp_path / "disk"))
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-00000200"]


def test_of_another_run_nothing_is_taken_and_what_a_dead_one_began_is_in_nobodys_way(tmp_path: Path) -> None:
    source = save_alone(tmp_path / "memory")
    (tmp_path / "disk" / "step-00000200.tmp-fetched" / "half").mkdir(parents=True)

    def bring(empty: Path) -> None:
        assert list(empty.iterdir()) == []
        shutil.copytree(source.path, empty, dirs_exist_ok=True)

    with pytest.raises(CheckpointError, match="belongs to run"):
        adopt(tmp_path / "disk", 200, "another", bring)
    assert list((tmp_path / "disk").iterdir()) == []
    assert adopt(tmp_path / "disk", 200, "run-a", bring) == Checkpoint.open(tmp_path / "disk" / "step-00000200")
