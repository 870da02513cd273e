"""What the supervisor does for copies in memory: attempts are counted, and nothing is lost or left at the end."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.host_memory import HostMemory, distrust, is_distrusted
from allranks.config import Config
from allranks.config_guard import GuardConfig
from allranks.run import Run
from allranks.surviving.memory_tier import MemoryTier, open_memory
from allranks.surviving.supervisor import Supervision
from tests.checkpointing.worlds import flip, header, save_alone


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run whose first attempt has begun."""
    made = Run.create(tmp_path, "task", Config(), {}, directory=tmp_path / "run")
    made.begin_attempt()
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """In place of /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def opened(run: Run, root: Path) -> MemoryTier:
    tier = open_memory(run, wanted=True, root=root)
    assert tier is not None
    return tier


def save(directory: Path, step: int, run: Run) -> Any:
    return save_alone(directory, header=header(step, run=run.id))


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
    run.begin_attempt()
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
    run.begin_attempt()
    again = open_memory(run, wanted=False, root=root)
    assert again is not None and steps(again.directory) == ["step-00000030"], "wanted or not, it counts"


def test_where_nothing_is_wanted_or_left_nothing_is_made(run: Run, root: Path) -> None:
    dead = HostMemory("0123456789abcdef", root)
    dead.open(1)
    dead.release()
    assert open_memory(run, wanted=False, root=root) is None
    assert list(root.iterdir()) == [], "but what dead runs have left goes all the same"


def test_attempts_of_one_command_know_of_the_copies_and_one_elsewhere_does_not(
    run: Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, told = opened(run, root), list[str]()

    def count() -> None:
        told.append("counted")
        run.begin_attempt()

    supervision = Supervision(GuardConfig(), lambda verdict: None, count, lambda: "half")
    followed = tier.followed(supervision)
    assert replace(followed, next_attempt=supervision.next_attempt) == supervision
    followed.next_attempt()
    save(tier.directory, 30, run)
    tier._memory.release()  # the command is killed
    run.begin_attempt()
    tier = opened(run, root)
    assert told == ["counted"] and steps(tier.directory) == ["step-00000030"] and capsys.readouterr().err == ""
    tier._memory.release()
    for _ in range(2):  # the first of them on another host
        run.begin_attempt()
    tier = opened(run, root)
    assert steps(tier.directory) == []
    assert "step-00000030 in the memory of this host does not count, and is gone" in capsys.readouterr().err
