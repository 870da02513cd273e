"""Who reads a checkpoint holds it against retention: while it reads, as long as it lives, without a right to write."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints
from allranks.checkpointing.reading import held, unless_read
from allranks.checkpointing.retention import prune
from allranks.errors import CheckpointError
from tests.checkpointing.worlds import save_alone
from tests.processes import wait_until

HOLD = (
    "import sys, time\nfrom allranks.checkpointing.reading import held\nwith held(sys.argv[1]):\n    print(flush=True)"
)
HOLD += "\n    time.sleep(600)"


def steps(directory: Path) -> list[int]:
    return sorted(Checkpoint.open(path).step for path in list_checkpoints(directory))


def make(directory: Path, *numbers: int) -> list[Path]:
    return [save_alone(directory, step).path for step in numbers]


def test_what_is_read_stays_and_goes_once_it_is_not(tmp_path: Path) -> None:
    first, second, _ = make(tmp_path, 100, 200, 300)
    with held(first), held(first), held(second):
        assert prune(tmp_path, 1) == [] and steps(tmp_path) == [100, 200, 300]
    with held(first):
        assert prune(tmp_path, 1) == [second] and steps(tmp_path) == [100, 300]
    assert prune(tmp_path, 1) == [first] and steps(tmp_path) == [300]


def test_another_process_holds_it_until_it_dies(tmp_path: Path) -> None:
    first, _ = make(tmp_path, 100, 200)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(first)], stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert reader.stdout is not None and reader.stdout.readline() == "\n"
            assert prune(tmp_path, 1) == [] and first.is_dir()
        finally:
            reader.send_signal(signal.SIGKILL)
    wait_until(lambda: prune(tmp_path, 1) == [first])


def test_who_comes_while_it_is_deleted_is_told(tmp_path: Path) -> None:
    (first,) = make(tmp_path, 100)

    def rename(path: Path) -> Path:
        with (
            pytest.raises(CheckpointError, match="is being deleted: it is older than those that its run keeps"),
            held(path),
        ):
            raise AssertionError("nobody reads it now")
        return path.rename(tmp_path / "trash")

    assert unless_read(first, rename) == tmp_path / "trash"
    with held(first), pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(first)


def test_nothing_of_it_is_open_when_its_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of NFS gives an open file another name, and then its directory cannot be removed."""
    unlink = os.unlink

    def unlink_over_nfs(path: Any, *, dir_fd: int | None = None) -> None:
        file = os.stat(path, dir_fd=dir_fd)
        here = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        if any(os.path.exists(one) and os.path.samestat(os.stat(one), file) for one in here):
            os.rename(path, f".nfs{os.path.basename(path)}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)

    first, _ = make(tmp_path, 100, 200)
    monkeypatch.setattr(os, "unlink", unlink_over_nfs)
    assert prune(tmp_path, 1) == [first] and [path.name for path in tmp_path.iterdir()] == ["step-00000200"]


def test_who_was_between_its_name_and_its_lock_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = make(tmp_path, 100)
    lock = fcntl.flock

    def flock(descriptor: int, kind: int) -> None:
        first.rename(tmp_path / "trash")
        lock(descriptor, kind)

    monkeypatch.setattr("allranks.checkpointing.reading.fcntl.flock", flock)
    with pytest.raises(CheckpointError, match="is being deleted"), held(first):
        pass


def test_nothing_is_written_so_a_read_only_checkpoint_is_held_too(tmp_path: Path) -> None:
    first, _ = make(tmp_path, 100, 200)
    (first / "COMMITTED").chmod(0o444)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in first.iterdir())
    first.chmod(0o555)
    with held(first):
        assert unless_read(first, lambda path: pytest.fail("it is read")) is None
    first.chmod(0o755)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in first.iterdir()) == before


def test_where_there_are_no_locks_nothing_is_held_and_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    first, _ = make(tmp_path, 100, 200)
    monkeypatch.setattr("allranks.checkpointing.reading.fcntl.flock", no_locks)
    with held(first):
        assert prune(tmp_path, 1) == [first]


def test_what_was_never_committed_is_not_held(tmp_path: Path) -> None:
    (first,) = make(tmp_path, 100)
    (first / "COMMITTED").unlink()
    os.mkfifo(first / "COMMITTED")  # nor waited for
    with held(first), held(tmp_path / "nowhere"):
        pass


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    first, _ = make(tmp_path, 100, 200)
    before = len(os.listdir("/proc/self/fd"))
    with held(first):
        pass
    unless_read(first, lambda path: path)
    assert len(os.listdir("/proc/self/fd")) == before
