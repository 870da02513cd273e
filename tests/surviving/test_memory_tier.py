"""What the supervisor does for copies in memory: attempts are counted, and nothing is lost or left at the end."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.host_memory import HostMemory, distrust, is_distrusted
from allranks.config import Config
from allranks.config_guard import GuardConfig
from allranks.errors import RunError
from allranks.run import Run
from allranks.surviving.memory_tier import MemoryTier, open_memory
from allranks.surviving.supervisor import Supervision
from tests.checkpointing.worlds import flip, header, save_alone


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """In place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def opened(run: Run, root: Path) -> MemoryTier:
    """As at a start of the command."""
    tier = open_memory(Run.open(run.path), wanted=True, root=root, say=lambda line: print(line, file=sys.stderr))
    assert tier is not None
    tier.begin_attempt()
    return tier


def save(directory: Path, step: int, run: Run) -> Any:
    return save_alone(directory, header=header(step, run=run.id, generation=Run.open(run.path).attempts))


def steps(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


def test_what_is_only_in_memory_is_brought_to_the_disk_at_the_end(
    run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = opened(run, root)
    save(run.checkpoints, 10, run)
    save(tier.directory, 30, run)
    tier.close()
    assert steps(run.checkpoints) == ["step-00000030", "step-00000010"] and list(root.iterdir()) == []
    verify_files(Checkpoint.open(run.checkpoints / "step-00000030", run.id))
    said = capsys.readouterr().err
    assert said == "step-00000030, which was in the memory of this host alone, is on the disk now\n"


@pytest.mark.parametrize("saved", [30, 40])
def test_what_the_disk_has_too_just_goes(run: Run, root: Path, capsys: pytest.CaptureFixture[str], saved: int) -> None:
    tier = opened(run, root)
    save(run.checkpoints, saved, run)
    save(tier.directory, 30, run)
    tier.close()
    assert steps(run.checkpoints) == [f"step-{saved:08d}"] and list(root.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_what_is_read_for_long_at_the_end_is_said_first(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both places."""
    monkeypatch.setattr("allranks.surviving.left_behind.TOLD_BYTES", 1)
    tier = opened(run, root)
    for directory in (run.checkpoints, tier.directory):
        save(directory, 30, run)
    tier.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition("/step-")[0] for line in said] == [
        f"note: reading {directory}" for directory in (tier.directory, run.checkpoints)
    ]


def test_what_is_damaged_is_not_brought(run: Run, root: Path) -> None:
    tier = opened(run, root)
    flip(save(tier.directory, 30, run).path / "rank-00000.safetensors", 8000)
    tier.close()
    assert steps(run.checkpoints) == [] and list(root.iterdir()) == []


def test_what_a_guard_distrusts_is_not_brought_and_does_not_count(run: Run, root: Path) -> None:
    tier = opened(run, root)
    distrust(tier.directory)
    save(tier.directory, 30, run)  # committed by a rank that was still writing
    tier.close()
    assert steps(run.checkpoints) == [] and list(root.iterdir()) == []
    tier = opened(run, root)
    save(tier.directory, 30, run)
    distrust(tier.directory)
    tier._memory.release()  # the command is killed before it closes
    again = opened(run, root)
    assert steps(again.directory) == [] and not is_distrusted(again.directory)


def test_what_the_disk_refuses_stays_for_the_next_start(
    run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = opened(run, root)
    save(tier.directory, 30, run)
    run.checkpoints.rmdir()
    run.checkpoints.write_text("no directory")
    tier.close()
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and str(tier.directory) in told and "Not a directory" in told and "--resume" in told
    again = open_memory(Run.open(run.path), wanted=False, root=root)
    assert again is not None and steps(again.directory) == ["step-00000030"], "wanted or not, it counts"


def test_where_nothing_is_wanted_or_left_nothing_is_made(run: Run, root: Path) -> None:
    dead = HostMemory("0123456789abcdef", root)
    dead.open()
    dead.release()
    assert open_memory(run, wanted=False, root=root) is None
    assert list(root.iterdir()) == [], "but what dead runs have left goes all the same"
    foreign = HostMemory(run.id, root).directory
    foreign.symlink_to("/tmp")
    assert open_memory(run, wanted=False, root=root) is None, "who takes the name of a run's memory stops no run"


def supervision() -> Supervision:
    """One whose own count is not asked for."""
    return Supervision(GuardConfig(), lambda verdict: None, lambda: None, lambda: "half")


def test_attempts_of_one_command_know_of_the_copies_and_one_elsewhere_does_not(
    run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, given = opened(run, root), supervision()
    followed = tier.followed(given)
    assert replace(followed, next_attempt=given.next_attempt) == given
    followed.next_attempt()
    assert Run.open(run.path).attempts == 3
    save(tier.directory, 30, run)
    tier._memory.release()  # the command is killed
    tier = opened(run, root)
    assert steps(tier.directory) == ["step-00000030"] and capsys.readouterr().err == ""
    tier._memory.release()
    Run.open(run.path).begin_attempt()  # on another host
    tier = opened(run, root)
    assert steps(tier.directory) == []
    assert "step-00000030 in the memory of this host does not count, and is gone" in capsys.readouterr().err


@pytest.mark.parametrize("since", [0, 1])
def test_a_backup_that_is_brought_back_does_not_know_of_later_copies(
    run: Run, root: Path, tmp_path: Path, since: int
) -> None:
    """Not even where as many attempts have begun in it since."""
    shutil.copytree(run.path, tmp_path / "backup")
    tier = opened(run, root)
    save(tier.directory, 30, run)
    tier._memory.release()
    shutil.rmtree(run.path)
    shutil.move(tmp_path / "backup", run.path)
    for _ in range(since):
        Run.open(run.path).begin_attempt()
    assert steps(opened(run, root).directory) == []


class KilledError(BaseException):
    """The end of the command."""


@pytest.mark.parametrize("when", ["opened", "noted", "counted"])
def test_a_command_that_ends_while_it_begins_loses_no_copy(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    tier = opened(run, root)
    save(tier.directory, 30, run)
    tier._memory.release()
    real = Run.begin_attempt

    def begin(own: Run, attempt: str | None = None) -> int:
        if when == "counted":
            real(own, attempt)
        raise KilledError

    tier = MemoryTier(Run.open(run.path), tier._memory)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "begin_attempt", begin)
        tier.open()
        if when != "opened":
            with pytest.raises(KilledError):
                tier.begin_attempt()
    tier._memory.release()
    assert steps(opened(run, root).directory) == ["step-00000030"] and capsys.readouterr().err == ""


def test_what_another_dead_run_has_nowhere_else_stays_and_is_told_of(
    run: Run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "other")
    theirs = opened(other, root)
    save(theirs.directory, 30, other)
    theirs._memory.release()  # both commands are killed
    opened(run, root).close()
    (said,) = capsys.readouterr().err.splitlines()
    assert str(theirs.directory / "step-00000030") in said and f"--resume {tmp_path / 'other'}" in said
    theirs = opened(other, root)
    theirs.close()
    assert steps(other.checkpoints) == ["step-00000030"] and list(root.iterdir()) == []


def test_a_copy_of_a_run_does_not_take_what_the_original_needs(run: Run, root: Path, tmp_path: Path) -> None:
    tier = opened(run, root)
    save(tier.directory, 30, run)
    tier._memory.release()
    shutil.copytree(run.path, tmp_path / "copied")
    for path in (tmp_path / "copied", tmp_path / "linked"):
        if path.name == "linked":
            path.symlink_to(run.path)
            assert steps(opened(Run.open(path), root).directory) == ["step-00000030"], "the same by another name"
        else:
            with pytest.raises(RunError, match=f"copied is a copy of {run.path}, which comes first"):
                opened(Run.open(path), root)


def test_one_that_was_moved_keeps_its_copies(run: Run, root: Path, tmp_path: Path) -> None:
    tier = opened(run, root)
    save(tier.directory, 30, run)
    tier._memory.release()
    moved = Run.open(run.path.rename(tmp_path / "moved"))
    assert steps(opened(moved, root).directory) == ["step-00000030"]


def test_a_directory_that_vanishes_ends_no_run(run: Run, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tier = opened(run, root)
    shutil.rmtree(tier.directory)
    tier.followed(supervision()).next_attempt()
    (said,) = capsys.readouterr().err.splitlines()
    assert "has vanished" in said and "is made again" in said and "RemoveIPC" in said
    assert tier._memory.stands() and Run.open(run.path).attempts == 3
    shutil.rmtree(root)
    tier.followed(supervision()).next_attempt()
    assert "may not outlive this command" in capsys.readouterr().err and Run.open(run.path).attempts == 4
    tier.close()
    (said,) = capsys.readouterr().err.splitlines()
    assert "has vanished" in said and not root.exists()


def test_a_damaged_checkpoint_that_is_newer_does_not_let_a_good_copy_go(run: Run, root: Path) -> None:
    tier = opened(run, root)
    save(tier.directory, 30, run)
    flip(save(run.checkpoints, 40, run).path / "rank-00000.safetensors", 8000)
    tier.close()
    assert steps(run.checkpoints) == ["step-00000040", "step-00000030"] and list(root.iterdir()) == []
