"""What a dead run has left in memory goes only where nobody would miss it."""

import shutil
from pathlib import Path

import pytest

from allranks.checkpointing.host_memory import HostMemory, Record, distrust
from allranks.run import Run
from allranks.surviving.left_behind import is_newer, left_behind, telling
from allranks.units import format_bytes
from tests.checkpointing.worlds import flip, header, save_alone
from tests.commands import own_words


@pytest.fixture
def left(run: Run, tmp_path: Path) -> Path:
    """Where it has left a copy of step 30."""
    memory = HostMemory(run.id, tmp_path)
    memory.open()
    memory.note(Record(run.path, (run.attempt,)))
    save_alone(memory.directory, header=header(30, run=run.id))
    memory.release()
    return memory.directory


def test_what_the_disk_has_not_is_missed(run: Run, left: Path) -> None:
    found = left_behind(left, print)
    assert found is not None and (found.run, found.copy) == (run.path, left / "step-00000030")
    assert "\n" not in str(found) and f"--resume {run.path}" in str(found)
    save_alone(run.checkpoints, header=header(29, run=run.id))
    assert left_behind(left, print) is not None
    saved = save_alone(run.checkpoints, header=header(30, run=run.id))
    assert left_behind(left, print) is None
    flip(saved.path / "rank-00000.safetensors", 8000)
    assert left_behind(left, print) is not None and is_newer(left / "step-00000030", run, print), (
        "what is damaged replaces nothing"
    )


def test_the_next_command_says_it_once_and_tests_of_other_runs_pass_over_it(
    run: Run, left: Path, tmp_path: Path
) -> None:
    told = list[str]()
    assert telling(told.append, "another")(left) and len(told) == 1
    said = f"{told[0]}\nrefused\n"
    assert own_words(said, tmp_path / "elsewhere") == "refused\n" and own_words(said, run.path) == said


@pytest.mark.parametrize("least", [1, 1 << 33])
def test_what_is_read_for_long_is_said_first(run: Run, left: Path, monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    saved = save_alone(run.checkpoints, header=header(30, run=run.id))
    monkeypatch.setattr("allranks.surviving.left_behind.TOLD_BYTES", least)
    told = list[str]()
    assert left_behind(left, told.append) is None
    line = f"note: reading {saved.path} ({format_bytes(saved.num_bytes)}) to see that it is whole"
    assert told == ([line] if least == 1 else [])


def test_what_does_not_count_is_not_missed(run: Run, left: Path) -> None:
    run.begin_attempt()  # elsewhere
    assert left_behind(left, print) is None


@pytest.mark.parametrize("how", ["distrusted", "empty", "unknown", "gone", "another"])
def test_nor_is_what_nobody_can_go_on_from(run: Run, left: Path, how: str) -> None:
    if how == "distrusted":
        distrust(left)
    elif how == "empty":
        shutil.rmtree(left / "step-00000030")
    elif how == "unknown":
        (left / "record.json").unlink()
    elif how == "gone":
        shutil.rmtree(run.path)
    else:
        run.replace_identity("another", {})
    assert left_behind(left, print) is None


def test_a_run_that_cannot_be_read_now_may_be_read_later(run: Run, left: Path) -> None:
    (run.path / "run.json").write_text("{torn")
    assert left_behind(left, print) is not None
