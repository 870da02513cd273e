"""Which checkpoint of a run counts. The directories are real ones, made by a run."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.errors import CheckpointError
from allranks.run import Run
from allranks.training.newest import newest_of_run, resume_warnings
from tests.checkpointing.worlds import counted_reads
from tests.training.runs import damage, flip_a_byte, start

# Its names are replaced below, which a type checker would only allow for names that it exports.
newest: Any = importlib.import_module("allranks.training.newest")


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


def find(run: Path, memory: Path | None = None) -> tuple[int | None, list[str]]:
    """The step of the newest good one, and why newer ones are none."""
    checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id, memory)
    return None if checkpoint is None else checkpoint.step, skipped


def test_the_newest_is_taken_silently(run: Path) -> None:
    (run / "checkpoints" / "step-00000009.tmp-ab12").mkdir()
    assert find(run) == (4, [])
    damage(run, 2)
    (run / "checkpoints" / "step-00000003" / "COMMITTED").unlink()
    assert find(run) == (4, []), "older ones do not matter"


def test_who_reads_the_files_in_another_way_says_what_is_good(run: Path) -> None:
    asked = list[int]()

    def check(checkpoint: Checkpoint) -> None:
        asked.append(checkpoint.step)
        if checkpoint.step > 2:
            raise CheckpointError(f"no {checkpoint.step}")

    with counted_reads() as (opened, _):
        checkpoint, skipped = newest_of_run(run / "checkpoints", Run.open(run).id, check=check)
    assert checkpoint is not None and checkpoint.step == 2
    assert (asked, skipped, opened) == ([4, 3, 2], ["no 4", "no 3"], [])


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


def move_to_memory(run: Path, *steps: int) -> Path:
    """Have these in memory instead of on the disk."""
    memory = run / "memory"
    memory.mkdir(exist_ok=True)
    for step in steps:
        (run / "checkpoints" / f"step-{step:08d}").rename(memory / f"step-{step:08d}")
    return memory


def test_what_is_newest_in_memory_is_taken_and_the_disk_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, read = move_to_memory(run, 4), list[Path]()
    real = newest.newest_good

    def look(directory: Path, run_id: str, *check: Any) -> object:
        read.append(directory)
        return real(directory, run_id, *check)

    monkeypatch.setattr(newest, "newest_good", look)
    damage(run, 3)
    assert find(run, memory) == (4, []) and read == [memory]
    assert find(run) == (2, find(run)[1])


def test_what_is_newer_on_the_disk_is_taken(run: Path) -> None:
    memory = move_to_memory(run, 3)
    assert find(run, memory) == (4, [])
    flip_a_byte(memory / "step-00000003")
    assert find(run, memory) == (4, []), "older ones do not matter there either"


def test_a_damaged_copy_is_accounted_for_and_so_is_what_the_disk_has_lost(run: Path) -> None:
    memory = move_to_memory(run, 4)
    flip_a_byte(memory / "step-00000004")
    found, skipped = find(run, memory)
    assert found == 3 and len(skipped) == 1 and str(memory / "step-00000004") in skipped[0]
    (memory / "step-00000004").rename(run / "moved")
    move_to_memory(run, 2)
    damage(run, 3)
    found, skipped = find(run, memory)
    assert found == 2 and len(skipped) == 1 and str(run / "checkpoints" / "step-00000003") in skipped[0]


def test_where_all_on_the_disk_are_damaged_a_copy_saves_the_run_and_a_damaged_one_refuses_nothing(run: Path) -> None:
    memory = move_to_memory(run, 1)
    for step in (2, 3, 4):
        damage(run, step)
    found, skipped = find(run, memory)
    assert found == 1 and len(skipped) == 3
    flip_a_byte(memory / "step-00000001")
    with pytest.raises(CheckpointError, match="holds no good checkpoint") as refused:
        find(run, memory)
    assert str(memory) not in str(refused.value)
    shutil.rmtree(run / "checkpoints")
    found, skipped = find(run, memory)
    assert found is None and len(skipped) == 1, "a copy may be lost: the run begins anew, and says so"


def test_before_it_goes_on_a_run_says_who_else_may_write_into_it(run: Path) -> None:
    found, _ = newest_of_run(run / "checkpoints", Run.open(run).id)
    assert resume_warnings(run / "checkpoints", found, [], 2) == []
    assert resume_warnings(run / "checkpoints", found, ["torn"], 2) == ["passed over a newer checkpoint: torn"]
    (run / "checkpoints").chmod(0o777)
    open_, torn = resume_warnings(run / "checkpoints", found, ["torn"], 2)
    assert open_.startswith(f"{run / 'checkpoints'} may be written by everybody (mode 0777): ") and "torn" in torn
    assert resume_warnings(run / "checkpoints", None, [], 1) == []
    assert resume_warnings(run / "checkpoints", None, [], 2) == [
        "there is no checkpoint yet: the run starts from the beginning"
    ]
