"""The commit: what is on the disk before what, what may be replaced, and what makes no whole."""

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks import durable
from allranks.checkpointing import commit as commit_module
from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.commit import Share, check_target, commit, explain
from allranks.checkpointing.retention import collect_leftovers
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import flip, header, save_alone


def share(rank: int, offset: int, extent: int, **changes: Any) -> Share:
    tensor = ("w", "float32", (4,), (offset,), (extent,), 5)
    return replace(Share(rank, tensors=[tensor]), **changes)


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        held = ",".join(sorted(p.name for p in path.iterdir())) if path.is_dir() else path.stat().st_size > 0
        order.append(f"sync {path.relative_to(tmp_path.parent)} {held}")
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> None:
        order.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    save_alone(tmp_path / "checkpoints")
    base, temporary = f"{tmp_path.name}/checkpoints", "step-00000200.tmp-t1"
    assert order == [
        f"sync {base}/{temporary}/rank-00000.safetensors True",
        f"sync {base}/{temporary}/manifest.json True",
        f"sync {base}/{temporary}/COMMITTED True",
        f"sync {base}/{temporary} COMMITTED,manifest.json,rank-00000.safetensors",
        f"rename {temporary} step-00000200",
        f"sync {base} step-00000200",
        f"sync {tmp_path.name} checkpoints",
    ]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_the_same_step_again_replaces_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(commit_module, "_exchange", lambda first, second: False)
    save_alone(tmp_path, state={"attempt": 1})
    again = save_alone(tmp_path, state={"attempt": 2}, header=header(generation=2), token="t2")
    assert again.manifest.state == Checkpoint.open(tmp_path / "step-00000200").manifest.state == {"attempt": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000200"]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_what_cannot_be_settled_is_not_there_and_what_was_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool, there: bool
) -> None:
    """The disk refuses the sync after the rename."""
    if not can_exchange:
        monkeypatch.setattr(commit_module, "_exchange", lambda first, second: False)
    save_alone(tmp_path, 100)
    if there:
        save_alone(tmp_path, state={"attempt": 1})
    before, real = tree(tmp_path), durable.sync

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(commit_module, "sync", sync)
        with pytest.raises(CheckpointError, match="Input/output error; older checkpoints are untouched"):
            save_alone(tmp_path, state={"attempt": 2}, header=header(generation=2), token="t2")
    assert tree(tmp_path) == before and len(list(tmp_path.iterdir())) == 1 + there
    save_alone(tmp_path, state={"attempt": 3}, header=header(generation=2), token="t3")
    assert Checkpoint.open(tmp_path / "step-00000200").manifest.state == {"attempt": 3}


def test_names_are_swapped_at_once_where_the_system_can(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").write_text("x")
    if not commit_module._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("no renameat2 with RENAME_EXCHANGE here")
    assert (tmp_path / "b" / "x").read_text() == "x" and not list((tmp_path / "a").iterdir())
    assert not commit_module._exchange(tmp_path / "a", tmp_path / "missing")


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    old = save_alone(tmp_path)
    flip(old.path / "manifest.json", 100)
    save_alone(tmp_path, state={}, token="t2")
    assert Checkpoint.open(old.path).manifest.state == {}


def test_another_runs_and_a_later_attempts_are_left_alone(tmp_path: Path) -> None:
    save_alone(tmp_path, header=header(generation=5))
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to run 'run-a', this is 'run-b'"):
        save_alone(tmp_path, header=header(run="run-b", generation=6))
    with pytest.raises(CheckpointError, match="is from attempt 5 of this run, this is attempt 4"):
        save_alone(tmp_path, header=header(generation=4))
    assert tree(tmp_path) == before and len(list(tmp_path.iterdir())) == 1


def test_once_a_later_attempt_has_begun_nothing_is_committed_for_an_earlier_one(tmp_path: Path) -> None:
    checkpoints, record = tmp_path / "checkpoints", tmp_path / "run.json"
    for told in ('{"id": "run-a", "attempts": 4}', '{"id": "run-b", "attempts": 9}', "[]"):
        record.write_text(told)
        save_alone(checkpoints, header=header(generation=4))
    before = tree(checkpoints)
    record.write_text('{"id": "run-a", "attempts": 5}')
    with pytest.raises(CheckpointError, match="attempt 5 of this run has begun, this is attempt 4"):
        save_alone(checkpoints, 300, header=header(300, generation=4), token="t4")
    assert tree(checkpoints) == before
    save_alone(checkpoints, 300, header=header(300, generation=5), token="t5")
    record.write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        save_alone(checkpoints, 400, header=header(400, generation=5), token="t5")


def test_a_copy_in_a_hosts_memory_asks_nobodys_record(tmp_path: Path) -> None:
    """What lies beside its directory in /dev/shm is any user's."""
    (tmp_path / "run.json").write_text(json.dumps({"id": "0" * 16, "attempts": 99}))
    memory = tmp_path / "allranks-run-0000000000000000"
    assert save_alone(memory, header=header(3, run="0" * 16)).manifest.step == 3
    (tmp_path / "run.json").write_text("torn")
    assert save_alone(memory, header=header(4, run="0" * 16)).manifest.step == 4


def test_who_takes_over_between_the_check_and_the_rename_leaves_nothing_to_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, check = tmp_path / "checkpoints", commit_module.check_attempt

    def check_and_lose(target: Path, run: str, attempt: int) -> None:
        check(target, run, attempt)
        collect_leftovers(checkpoints)

    monkeypatch.setattr(commit_module, "check_attempt", check_and_lose)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save_alone(checkpoints)
    assert list(checkpoints.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_directory_is_left_alone(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "step-00000200"
    (tmp_path / "other").mkdir()
    target.write_text("mine") if kind == "file" else target.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is no directory; move it away"):
        check_target(target, header())
    check_target(tmp_path / "step-00000300", header())


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(0, 0, 2)], "2 of its 4 elements"),
        ([share(0, 0, 3), share(1, 1, 3)], "6 of its 4 elements"),
        ([share(0, 0, 2), share(1, 1, 2)], "two boxes overlap"),
        ([share(0, 0, 4), share(1, 0, 0, tensors=[("w", "float64", (4,), (0,), (0,), 0)])], "'w' is .*float64"),
        ([share(0, 0, 4), share(1, 0, 0, tensors=[], error="rank 1: no")], "^rank 1: no$"),
        ([Share(0, error="rank 0: no"), Share(1, error="rank 1: no")], r"^rank 0: no \(and 1 more\)$"),
        (
            [share(0, 0, 4, files={"a.safetensors": {"bytes": 1, "chunks": [[0, 1, "0" * 64]]}})],
            "written by its rank, not to be seen here",
        ),
    ],
)
def test_shares_that_make_no_whole_are_not_committed(tmp_path: Path, shares: list[Share], message: str) -> None:
    temporary = tmp_path / "step-00000200.tmp-t"
    temporary.mkdir()
    with pytest.raises(CheckpointError, match=message):
        commit(temporary, tmp_path / "step-00000200", header(), shares, {}, "2.13.0")
    assert [path.name for path in tmp_path.iterdir()] == [temporary.name]


def test_what_cannot_be_deleted_after_the_commit_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_alone(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert save_alone(tmp_path, state={"attempt": 2}, token="t2").manifest.state == {"attempt": 2}


def test_a_full_disk_is_explained_with_what_is_needed_and_free(tmp_path: Path) -> None:
    text = explain(
        OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "f")), tmp_path / "no" / "f", 3_000_000
    )
    assert text.startswith(f"{tmp_path / 'f'}: No space left on device (this rank needs 3.0 MB, ")
    quota = explain(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path)
    assert "Disk quota exceeded (a quota is used up, `quota -s` tells which; of the disk itself " in quota
    assert explain(OSError(errno.EIO, "Input/output error"), tmp_path) == f"{tmp_path}: Input/output error"
    assert explain(CheckpointError("as it is"), tmp_path) == "as it is"
    assert explain(ValueError("x"), tmp_path) == "ValueError: x"
