"""Which checkpoints stay and which go, and what of a writer that died is collected."""

import shutil
from pathlib import Path

import pytest

from allranks.checkpointing.checkpoint import check_sizes, list_checkpoints
from allranks.checkpointing.retention import bytes_in, collect_leftovers, prune
from allranks.errors import CheckpointError
from tests.checkpointing.test_checkpoint import DATA, names, rewrite
from tests.checkpointing.worlds import counted_reads, flip, save_alone


def test_the_newest_good_ones_stay(tmp_path: Path) -> None:
    for step in range(100, 700, 100):
        save_alone(tmp_path, step)
    flip(tmp_path / "step-00000500" / DATA, 8 * 1200)
    gone = prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000400", "step-00000500", "step-00000600"]  # 500 is damaged: 400 stays for it
    assert sorted(path.name for path in gone) == ["step-00000100", "step-00000200", "step-00000300"]
    save_alone(tmp_path, 700)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000600", "step-00000700"]
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000700"]
    assert prune(tmp_path, 1) == prune(tmp_path / "nowhere", 1) == []
    with pytest.raises(ValueError, match="keep=0"):
        prune(tmp_path, 0)


def test_the_last_good_one_never_goes(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save_alone(tmp_path, step)
    for step in (200, 300, 400):
        flip(tmp_path / f"step-{step:08d}" / DATA, 8 * 1200)
    assert prune(tmp_path, 1) == []
    assert len(names(tmp_path)) == 4
    for path in list_checkpoints(tmp_path):
        (path / "COMMITTED").write_text("torn")
    assert prune(tmp_path, 1) == [] and len(names(tmp_path)) == 4


def test_a_cheaper_check_may_decide_what_counts(tmp_path: Path) -> None:
    for step in (100, 200):
        save_alone(tmp_path, step)
    flip(tmp_path / "step-00000200" / DATA, 8 * 1200)
    with counted_reads() as (opened, _):
        prune(tmp_path, 1, check=check_sizes)
    assert names(tmp_path) == ["step-00000200"] and opened == [tmp_path / "step-00000200" / DATA]


def test_what_dead_writers_left_is_collected_and_a_living_ones_stays(tmp_path: Path) -> None:
    save_alone(tmp_path, 100)
    for name in ("step-00000200.tmp-dead", "step-00000200.tmp-alive", ".trash-step-00000050-ab12", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    gone = prune(tmp_path, 2, token="alive")
    assert sorted(path.name for path in gone) == [".trash-step-00000050-ab12", "step-00000200.tmp-dead"]
    assert names(tmp_path) == ["notes", "step-00000100", "step-00000200.tmp-alive"]


def test_what_a_later_attempt_writes_stays(tmp_path: Path) -> None:
    save_alone(tmp_path, 100)
    later = ["step-00000200.tmp-ab12cd34_10", "step-00000200.tmp-ab12cd34_4"]
    for name in ("step-00000200.tmp-ab12cd34_3", "step-00000200.tmp-ab12cd34_2", "step-00000150.tmp-00ff", *later):
        (tmp_path / name).mkdir()
    prune(tmp_path, 2, generation=3)
    assert names(tmp_path) == ["step-00000100", *later]


def test_what_is_collected_loses_its_name_before_anything_of_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, rmtree = tmp_path / "step-00000200.tmp-old_1", shutil.rmtree
    begun.mkdir()
    (begun / "file").write_text("x")

    def see(path: Path, ignore_errors: bool = False) -> None:
        assert not begun.exists() and (path / "file").exists(), "whose writer wakes now has nothing to rename"
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", see)
    assert collect_leftovers(tmp_path) == [begun] and names(tmp_path) == []


def test_a_deletion_that_is_interrupted_leaves_no_half_under_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 200):
        save_alone(tmp_path, step)

    def die(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000200"]
    assert any(name.startswith(".trash-step-00000100-") for name in names(tmp_path))
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-00000200"]


def test_what_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (100, 200):
        save_alone(tmp_path, step)

    (tmp_path / "step-00000150.tmp-dead").mkdir()

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(13, "Permission denied")
        path.rmdir() if "dead" in path.name else None

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match="step-00000100 cannot be deleted: Permission denied"):
        prune(tmp_path, 1)
    assert not (tmp_path / "step-00000150.tmp-dead").exists(), "what can go goes"
    assert prune(tmp_path, 1) == [] and len(names(tmp_path)) == 2, "what did not go is not called gone"


def test_a_checkpoint_of_another_run_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400, 500):
        save_alone(tmp_path, step)
    for step in (100, 400, 500):
        rewrite(tmp_path / f"step-{step:08d}", '"run-a"', '"run-b"')
    (tmp_path / "step-00000100" / DATA).unlink()  # damaged, but its manifest says whose it is
    gone = prune(tmp_path, 1, "run-a")
    assert [path.name for path in gone] == ["step-00000200"]
    assert names(tmp_path) == ["step-00000100", "step-00000300", "step-00000400", "step-00000500"]
    assert prune(tmp_path, 1, "run-c") == []


def test_every_so_many_th_stays_beside_the_newest(tmp_path: Path) -> None:
    for step in range(100, 900, 100):
        save_alone(tmp_path, step)
    gone = prune(tmp_path, 2, keep_every=300)
    kept = [300, 600, 700, 800]
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept] and len(gone) == 4
    save_alone(tmp_path, 900)
    prune(tmp_path, 1, keep_every=300)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (300, 600, 900)], "the newest may be one of them"
    for step in (600, 900):
        flip(tmp_path / f"step-{step:08d}" / DATA, 8 * 1200)
    prune(tmp_path, 1)
    assert len(names(tmp_path)) == 3, "300 is the last good one"


def test_bytes_are_those_of_all_files(tmp_path: Path) -> None:
    checkpoint = save_alone(tmp_path, 100)
    (tmp_path / "step-00000200.tmp-dead").mkdir()
    (tmp_path / "step-00000200.tmp-dead" / "file").write_bytes(b"12345")
    whole = sum(path.stat().st_size for path in checkpoint.path.iterdir())
    assert bytes_in(tmp_path) == whole + 5 > checkpoint.num_bytes + 5
    assert bytes_in(tmp_path / "nowhere") == 0
