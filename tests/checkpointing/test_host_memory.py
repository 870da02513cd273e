"""A run's directory in memory: one holder, what dead ones have left goes, and nobody else's is touched."""

import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks.checkpointing.host_memory import (
    HostMemory,
    Record,
    check_there,
    left_of,
    parts_of,
    read_record,
    remove_dead,
)
from allranks.errors import ConfigError, RunError
from allranks.lease import Lease
from tests.checkpointing.worlds import save_alone

MINE, OTHER = "0123456789abcdef", "fedcba9876543210"
HOLD = """
import pathlib, sys, time
from allranks.checkpointing.host_memory import HostMemory
memory = HostMemory(sys.argv[1], pathlib.Path(sys.argv[2]))
memory.open()
(memory.directory / "step-00000007").mkdir()
print("held", flush=True)
time.sleep(60)
"""


def nobody(directory: Path) -> bool:
    """Misses it."""
    return False


@contextmanager
def supervising(run_id: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has opened the directory of a run, and left something there."""
    command = [sys.executable, "-c", HOLD, run_id, str(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_it_is_this_users_alone_and_gone_at_the_end(tmp_path: Path) -> None:
    memory = HostMemory(MINE, tmp_path)
    memory.open()
    assert memory.directory == tmp_path / f"allranks-run-{MINE}"
    assert stat.S_IMODE(memory.directory.stat().st_mode) == 0o700
    save_alone(memory.directory)
    with pytest.raises(RunError, match="is in use by pid"):
        HostMemory(MINE, tmp_path).open()
    memory.close()
    assert list(tmp_path.iterdir()) == []
    HostMemory(MINE, tmp_path).open()  # it can be had again


def test_what_is_held_stays_and_what_a_killed_holder_has_left_goes(tmp_path: Path) -> None:
    mine = HostMemory(MINE, tmp_path)
    mine.directory.mkdir()
    with supervising(OTHER, tmp_path) as other:
        assert remove_dead(mine.directory, nobody, tmp_path) == []
        assert (tmp_path / f"allranks-run-{OTHER}" / "step-00000007").is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert remove_dead(mine.directory, lambda directory: True, tmp_path) == []
        assert left_of(OTHER, tmp_path) == [tmp_path / f"allranks-run-{OTHER}"], "somebody would miss it"
        assert remove_dead(mine.directory, nobody, tmp_path) == [tmp_path / f"allranks-run-{OTHER}"]
    assert list(tmp_path.iterdir()) == [mine.directory], "it is spared, though nobody holds it"
    (tmp_path / f"allranks-run-{OTHER}.gone-0123abcd").mkdir()  # left by who was killed while removing
    assert len(left_of(OTHER, tmp_path)) == 1
    remove_dead(mine.directory, lambda directory: True, tmp_path)
    assert list(tmp_path.iterdir()) == [mine.directory]


def test_each_command_of_a_run_on_several_hosts_has_a_part_of_its_own(tmp_path: Path) -> None:
    first, second = (HostMemory.open_part(MINE, tmp_path) for _ in range(2))
    names = [f"allranks-part-{MINE}-{number}" for number in range(3)]
    assert [part.directory.name for part in (first, second)] == names[:2]
    first.release()  # its command is killed
    assert HostMemory.open_part(MINE, tmp_path).directory == first.directory, "who comes next takes it over"
    assert parts_of(MINE, tmp_path) == left_of(MINE, tmp_path) == [first.directory, second.directory]
    second.release()
    assert remove_dead(tmp_path / "none", lambda directory: True, tmp_path) == []
    assert remove_dead(tmp_path / "none", nobody, tmp_path) == [second.directory]


def test_what_is_noted_is_read_and_never_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(MINE, tmp_path)
    memory.open()
    assert read_record(memory.directory) is None
    record = Record(tmp_path / "run", ("a", "b"))
    memory.note(record)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, target: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(RunError, match="No space left"):
            memory.note(Record(tmp_path / "other", ("c",)))
    assert read_record(memory.directory) == record
    for text in ("", "[]", '{"run": "x"}', "[" * 100_000):
        (memory.directory / "record.json").write_text(text)
        assert read_record(memory.directory) is None


def test_what_has_vanished_is_made_again_and_closing_finds_nothing(tmp_path: Path) -> None:
    memory = HostMemory(MINE, tmp_path)
    memory.open()
    assert memory.stands()
    shutil.rmtree(memory.directory)
    (memory.directory / "step-00000003").mkdir(parents=True)  # by a worker, as its mode is by default
    assert not memory.stands()
    memory.open()
    assert memory.stands() and stat.S_IMODE(memory.directory.stat().st_mode) == 0o700
    with pytest.raises(RunError, match="is in use by pid"):
        HostMemory(MINE, tmp_path).open()
    shutil.rmtree(memory.directory)
    memory.close()
    assert list(tmp_path.iterdir()) == []


def test_what_others_have_there_is_not_touched(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    for path in (root / "allranks-x1", root / "allranks-run-1234", root / "torch_1", elsewhere / "kept"):
        path.mkdir(parents=True)
    (root / f"allranks-run-{MINE}").write_text("a file")
    (root / f"allranks-run-{OTHER}").symlink_to(elsewhere)
    before = sorted(root.rglob("*"))
    assert remove_dead(root / "none", nobody, root) == [] and sorted(root.rglob("*")) == before
    assert (elsewhere / "kept").is_dir() and not (elsewhere / "lease").exists()
    with pytest.raises(RunError, match="belongs to another user, or is no directory"):
        HostMemory(OTHER, root).open()
    (root / f"allranks-part-{OTHER}-0").symlink_to(elsewhere)
    assert HostMemory.open_part(OTHER, root).directory.name == f"allranks-part-{OTHER}-1"


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_directory_that_is_taken_for_dead_before_it_is_leased_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    memory, real, removed = HostMemory(MINE, tmp_path), Lease.acquire, list[str]()

    def acquire(lease: Lease) -> None:
        if not removed and when == "before":
            removed.append(when)
            shutil.rmtree(memory.directory)
        real(lease)
        if not removed:
            removed.append(when)
            shutil.rmtree(memory.directory)

    monkeypatch.setattr(Lease, "acquire", acquire)
    memory.open()
    assert removed == [when] and memory.directory.is_dir()
    with pytest.raises(RunError, match="is in use"):
        HostMemory(MINE, tmp_path).open()


def test_who_removes_dead_ones_does_not_meet_one_that_was_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, real = tmp_path / f"allranks-run-{MINE}", Lease.acquire
    directory.mkdir()

    def acquire(lease: Lease) -> None:
        real(lease)
        shutil.rmtree(directory)  # by another start, which was faster
        (directory / "of the living").mkdir(parents=True)

    monkeypatch.setattr(Lease, "acquire", acquire)
    assert remove_dead(tmp_path / "none", nobody, tmp_path) == [] and (directory / "of the living").is_dir()


def test_a_system_without_such_memory_is_refused(tmp_path: Path) -> None:
    check_there(tmp_path)
    with pytest.raises(ConfigError, match=r"checkpoint\.memory_every: .*nowhere is not there"):
        check_there(tmp_path / "nowhere")
