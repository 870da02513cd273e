"""Checkpoints beside the training: the same run and files, errors that surface, and nobody who waits too little."""

import errno
import importlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, verify_files
from allranks.checkpointing.commit import TAKEN_OVER
from allranks.errors import AllranksError, CheckpointError, GuardError, RollbackError, TaskError
from allranks.observing.counters import Stopwatch
from allranks.observing.heartbeat import Heartbeat
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.stepping.agreement import NOTHING, Agreed, Pending, Saving
from allranks.training import saves as saves_module
from allranks.training.save_clock import SaveClock
from allranks.training.saver import Saver
from allranks.training.saves import Saves
from allranks.training.snapshot import Contents
from allranks.training.worker import Assignment, work
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, TASKS, digests, events, losses, same_run, saved, start, train, train_outside

BESIDE = "checkpoint.asynchronous=true"
OFTEN = ("train.steps=9", "checkpoint.every=2", "checkpoint.keep=9")
NOT_ALIKE = "in step 4 the ranks ran different modules"

# Its names are replaced below, which a type checker would only allow for names that it exports.
portion: Any = importlib.import_module("allranks.checkpointing.portion")


def slowed(monkeypatch: pytest.MonkeyPatch, before: Callable[[Path], object]) -> None:
    """Let something happen before a rank's file is written."""
    real = portion.write_file

    def write(path: Path, *rest: Any) -> Any:
        before(path)
        return real(path, *rest)

    monkeypatch.setattr(portion, "write_file", write)


def writers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("allranks-step-")]


def test_the_run_and_its_checkpoints_are_those_of_one_that_waits(tmp_path: Path) -> None:
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    assert start("Curve", waits, *OFTEN) == 0
    assert start("Curve", beside, *OFTEN, BESIDE) == 0
    same_run(waits, beside, 9)
    assert saved(waits) == saved(beside) == [2, 4, 6, 8, 9]
    assert all(digests(waits, step) == digests(beside, step) for step in saved(waits))
    told = events(beside, "checkpoint")
    assert [(event["step"], event["samples"]) for event in told] == [(step, 10 * step) for step in (2, 4, 6, 8, 9)]
    assert [event["path"] for event in told] == [f"step-{step:08d}" for step in (2, 4, 6, 8, 9)]
    assert ["background_seconds" in event for event in told] == [True, True, True, True, False]
    assert not writers()


@pytest.mark.distributed
def test_on_several_ranks_too_and_a_run_goes_on_from_it(pool: Pools, tmp_path: Path) -> None:
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    settings = (*QUICK, "checkpoint.every=2", "checkpoint.keep=9")
    assert train_outside(pool, 2, "Curve", *settings, "train.steps=7", run=waits, layout="fsdp") == [0, 0]
    assert train_outside(pool, 2, "Curve", *settings, BESIDE, "train.steps=4", run=beside, layout="fsdp") == [0, 0]
    assert train_outside(pool, 2, None, "train.steps=7", resume=beside) == [0, 0]
    same_run(waits, beside, 7)
    assert saved(waits) == saved(beside) == [2, 4, 6, 7]
    assert all(digests(waits, step) == digests(beside, step) for step in saved(waits))
    for step in saved(beside):
        checkpoint = Checkpoint.open(beside / "checkpoints" / f"step-{step:08d}")
        verify_files(checkpoint)
        assert len(checkpoint.manifest.files) == 2 and len(list(checkpoint.path.iterdir())) == 4


def test_steps_go_on_while_it_is_written_and_the_next_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at, most = tmp_path / "run", dict[str, int](), list[int]()

    def write_slowly(path: Path) -> None:
        most.append(len(writers()))
        name = path.parent.name.partition(".")[0]
        due = min(6, int(name.removeprefix("step-")) + 2)
        deadline = time.monotonic() + 60
        while Run.open(run).last_step < due and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # in which a third step could be made
        at[name] = Run.open(run).last_step

    slowed(monkeypatch, write_slowly)
    monkeypatch.setattr(saves_module, "SLOW_SECONDS", 0.05)
    assert start("Curve", run, "train.steps=6", "checkpoint.every=2", BESIDE) == 0
    assert at["step-00000002"] == 4 and at["step-00000004"] == 6, "two steps were made meanwhile, and no third"
    assert max(most) == 1 and saved(run) == [4, 6]
    assert all(event["seconds"] > 0.05 for event in events(run, "checkpoint"))
    (verdict,) = events(run, "verdict")
    assert verdict["kind"] == "checkpoint" and verdict["step"] == 4
    assert verdict["what"].startswith("the checkpoint of step 2 was still being written when the next one came due")


def test_what_a_resume_will_not_do_again_stands_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = tmp_path / "run", dict[int, int]()
    real = Saver._keep

    def keep(saver: Saver, checkpoint: Checkpoint) -> None:
        seen[checkpoint.step] = Run.open(run).last_step
        real(saver, checkpoint)

    monkeypatch.setattr(Saver, "_keep", keep)
    assert start("Curve", run, "train.steps=6", "checkpoint.every=1", BESIDE) == 0
    assert set(seen) == {1, 2, 3, 4, 5, 6} and all(last >= step for step, last in seen.items())


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")
WAYS = pytest.mark.parametrize("way", ["checkpoint.asynchronous=false", BESIDE])


@WAYS
def test_while_the_journal_takes_no_lines_saves_fail_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run, full = tmp_path / "run", threading.Event()
    write = os.write

    def fill_or_empty(directory: Path, num_bytes: int) -> None:
        step = int(directory.name.partition(".")[0].removeprefix("step-"))
        full.set() if step == 4 else full.clear()

    def refuse(descriptor: int, content: bytes) -> int:
        if full.is_set() and os.readlink(f"/proc/self/fd/{descriptor}").endswith("rank-00000.jsonl"):
            raise NO_ROOM
        return write(descriptor, content)

    monkeypatch.setattr(portion, "_check_room", fill_or_empty)
    monkeypatch.setattr(os, "write", refuse)
    assert start("Curve", run, "train.steps=8", "checkpoint.every=2", way) == 0
    assert list(losses(run)) == list(range(1, 9)) and saved(run) == [6, 8]
    assert [event["step"] for event in events(run, "checkpoint")] == [2, 6, 8]
    journal, save = sorted(events(run, "verdict"), key=lambda event: event["kind"] != "journal")
    assert all(words in save["what"] for words in ("step-00000004 was not saved: ", ": lines of ", "No space left"))
    assert journal["kind"] == "journal" and journal["what"].endswith("and none is lost")


def test_a_journal_that_takes_no_lines_to_the_end_ends_the_run_by_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, write = tmp_path / "run", os.write

    def refuse(descriptor: int, content: bytes) -> int:
        if (run / "checkpoints" / "step-00000002").exists() and os.readlink(f"/proc/self/fd/{descriptor}")[-1] == "l":
            raise NO_ROOM
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(CheckpointError, match=r"step-00000008 was not saved: .*this is failed save 3 in a row"):
        start("Curve", run, "train.steps=40", "checkpoint.every=2")
    told = "".join(capfd.readouterr())
    assert (
        saved(run) == [2] and told.count("its lines are held back") == 1 and "lines of" in told and "are lost" in told
    )


def refused(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full whenever a checkpoint of these steps is written."""

    def refuse(path: Path) -> None:
        if int(path.parent.name.partition(".")[0].removeprefix("step-")) in steps:
            raise NO_ROOM

    slowed(monkeypatch, refuse)


@WAYS
def test_a_run_goes_on_when_saves_fail_and_says_so_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    refused(monkeypatch, 4, 6, 10)
    assert start("Curve", run, "train.steps=13", "checkpoint.every=2", way) == 0
    told = [event for event in events(run, "verdict") if event["kind"] == "checkpoint"]
    assert [event["what"].partition(" was not saved")[0][-1:] for event in told] == ["4", "6", "0"]
    assert all("rank 0: " in event["what"] and "No space left" in event["what"] for event in told)
    assert "the newest stays that of step 2" in told[1]["evidence"][0]
    assert [event["step"] for event in events(run, "checkpoint")] == [2, 8, 12, 13] and saved(run) == [12, 13]
    assert not writers() and not [path.name for path in (run / "checkpoints").iterdir() if ".tmp" in path.name]
    monkeypatch.undo()
    assert start("Curve", whole, "train.steps=13", "checkpoint.every=2") == 0
    same_run(whole, run, 13)


def test_an_error_beside_the_steps_is_told_of_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where what the ranks exchange in a step is read at its end; on CUDA it is read a step later."""
    run, real = tmp_path / "run", Saves.standing

    def standing(saves: Saves) -> Saving:
        if saves._under_way is not None:
            saves._under_way.save._thread.join(60)  # what fails has failed when the next step is exchanged
        return real(saves)

    refused(monkeypatch, 4)
    monkeypatch.setattr(Saves, "standing", standing)
    assert start("Curve", run, "train.steps=13", "checkpoint.every=4", "checkpoint.keep=9", BESIDE) == 0
    told = Run.open(run).events()
    (place,) = [place for place, event in enumerate(told) if event["event"] == "verdict"]
    assert "step-00000004 was not saved" in told[place]["what"]
    assert [event["step"] for event in told[:place] if event["event"] == "step"][-1] == 5


def test_the_first_one_beside_the_steps_is_held_against_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tmp_path / "run", Contents.state

    def behind(contents: Contents) -> dict[str, Any]:
        return real(contents) | {"stream": {"position": 1}}

    monkeypatch.setattr(Contents, "state", behind)
    with pytest.raises(
        GuardError, match=r"a resume from step-00000002 would not go on .* position is \{'position': 1\}"
    ):
        start("Curve", run, "train.steps=40", "checkpoint.every=2", BESIDE)
    assert 3 <= max(losses(run)) <= 6, "long before the save that is waited for"


@WAYS
def test_one_failed_save_too_many_ends_the_run_with_the_writers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    refused(monkeypatch, *range(4, 99))
    with pytest.raises(CheckpointError, match=r"step-00000008 was not saved: rank 0: .*No space left") as told:
        start("Curve", run, "train.steps=40", "checkpoint.every=2", way)
    assert told.value.exit_code == 78 and "failed save 3 in a row, 2 are borne" in str(told.value)
    assert saved(run) == [2] and 8 <= max(losses(run)) <= 10
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"] and not writers()
    monkeypatch.undo()
    assert train(None, "train.steps=10", resume=run) == 0
    assert start("Curve", whole, "train.steps=10", "checkpoint.every=2") == 0
    same_run(whole, run, 10)


@WAYS
def test_the_last_save_may_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    run = tmp_path / "run"
    refused(monkeypatch, 6)
    with pytest.raises(CheckpointError, match="step-00000006 was not saved"):
        start("Curve", run, "train.steps=6", "checkpoint.every=4", "checkpoint.failures=9", way)
    assert saved(run) == [4]


def test_the_last_save_is_made_again_where_it_failed_at_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, tried = tmp_path / "run", list[str]()

    def refuse_once(path: Path) -> None:
        tried.append(path.parent.name)
        if len(tried) == 2:
            raise NO_ROOM

    slowed(monkeypatch, refuse_once)
    assert start("Curve", run, "train.steps=4", "checkpoint.every=2") == 0
    assert len(tried) == 3 and saved(run) == [2, 4] and len(events(run, "verdict")) == 1


@pytest.mark.parametrize("grace", [0.001, 60.0])
def test_a_save_that_would_outlast_a_request_to_stop_is_told_of_once(tmp_path: Path, grace: float) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=6", "checkpoint.every=2", f"guard.stop_seconds={grace}") == 0
    told = [event["what"] for event in events(run, "verdict") if "guard.stop_seconds" in event["what"]]
    assert len(told) == (grace < 1) and all("more than the 0.001 s after which" in what for what in told)


def test_a_stop_that_cannot_save_is_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    refused(monkeypatch, *range(3, 99))
    signal_them = ("task.signal_after=9", "task.signal_name=SIGTERM")
    with pytest.raises(CheckpointError, match=r"step-0000000\d was not saved"):
        start("Curve", run, "train.steps=40", "checkpoint.every=2", *signal_them)
    assert saved(run) == [2] and max(losses(run)) < 10


@pytest.mark.parametrize("looks", [True, False], ids=["seen before", "met while it is written"])
def test_a_disk_that_is_really_full_is_borne_until_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here")
    run, ballast = small / "run", small / "ballast"

    def fill_or_empty(directory: Path, num_bytes: int) -> None:
        step = int(directory.name.partition(".")[0].removeprefix("step-"))
        if step == 4:
            disk = os.statvfs(small)
            ballast.write_bytes(bytes(disk.f_bavail * disk.f_frsize - 100_000))  # it takes twice as much
        elif step == 6:
            ballast.unlink()
        if looks:
            real(directory, num_bytes)

    real = portion._check_room
    monkeypatch.setattr(portion, "_check_room", fill_or_empty)
    try:
        assert start("Curve", run, "train.steps=8", "checkpoint.every=2", "task.width=3000") == 0
        (told,) = [event for event in events(run, "verdict") if event["kind"] == "checkpoint"]
        assert told["step"] == 4 and "No space left on device (this rank needs" in told["what"]
        assert saved(run) == [6, 8]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_save_that_fails_at_once_ends_a_run_that_bears_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    refused(monkeypatch, 4)
    with pytest.raises(CheckpointError, match=r"step-00000004 was not saved: .*older checkpoints are untouched$"):
        start("Curve", run, "train.steps=40", "checkpoint.every=2", "checkpoint.failures=0", BESIDE)
    assert saved(run) == [2] and max(losses(run)) <= 6


def work_beside_a_full_disk(request: TrainRequest) -> str:
    """In a worker: train; rank 1 cannot write its part of step 4, nor of later ones."""
    real = portion.write_file

    def write(path: Path, *rest: Any) -> Any:
        if path.name.startswith("rank-00001") and path.parent.name >= "step-00000004":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *rest)

    portion.write_file = write
    try:
        return str(work(Assignment(request)))
    except AllranksError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        portion.write_file = real


@pytest.mark.distributed
def test_an_error_on_one_rank_is_raised_by_all(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = (*QUICK, "train.steps=40", "checkpoint.every=2", "checkpoint.failures=1", BESIDE)
    request = TrainRequest(task_spec=f"{TASKS}:Curve", overrides=overrides, run=run, layout="ddp")
    first, second = pool(2).run_alone(work_beside_a_full_disk, request, timeout=120.0)
    assert first == second and first.startswith("CheckpointError: ")
    assert "step-00000006 was not saved: rank 1: " in first and "Input/output error" in first
    assert saved(run) == [2] and max(losses(run)) <= 8
    (told,) = events(run, "verdict")
    assert "step-00000004 was not saved: rank 1: " in told["what"] and told["step"] in (4, 5, 6)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_stop_waits_for_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"

    def stop(path: Path) -> None:
        if path.parent.name.startswith("step-00000002"):
            os.kill(os.getpid(), signal.Signals[name])
            time.sleep(0.3)

    slowed(monkeypatch, stop)
    assert start("Curve", run, "train.steps=9", "checkpoint.every=2", "checkpoint.keep=9", BESIDE) == code
    stopped = max(losses(run))
    assert stopped in (3, 4, 5) and saved(run) == sorted({2, stopped // 2 * 2, stopped})
    monkeypatch.undo()
    assert train(None, resume=run) == 0
    assert start("Curve", whole, "train.steps=9") == 0
    same_run(whole, run, 9)


def test_an_error_of_the_users_leaves_no_half_checkpoint_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    slowed(monkeypatch, lambda path: time.sleep(0.2))
    with pytest.raises(ValueError, match="mistake in metrics"):
        start("Curve", run, "train.steps=9", "checkpoint.every=2", "evaluate.every=4", "task.boom=metrics", BESIDE)
    assert saved(run) == [2] and not writers()
    monkeypatch.undo()
    assert train(None, "task.boom=fine", resume=run, change=["task.boom"]) == 0
    assert events(run, "resume")[-1]["step"] == 2
    assert not [path.name for path in (run / "checkpoints").iterdir() if ".tmp" in path.name]


@pytest.mark.distributed
def test_of_a_step_in_which_the_ranks_have_parted_nothing_is_kept(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ("train.steps=1", "checkpoint.every=1", "layout=fsdp", BESIDE)
    for refusal in train_outside(pool, 2, "Forked", *overrides, run=run):
        assert str(refusal).startswith("TaskError: in step 1 the ranks ran different modules")
    assert saved(run) == []


@dataclass
class Noted:
    """In place of a BackgroundSave: notes what is asked of it."""

    step: int
    asked: list[str] = field(default_factory=list)
    written = committed = failed = False

    @property
    def place(self) -> Any:
        return type("Place", (), {"target": Path(f"step-{self.step}")})

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)

    def give_way(self) -> bool:
        self.asked.append("give_way")
        return True


class NotedSaver:
    """In place of a Saver."""

    beside, saved_step, failures = True, -1, 0

    def __init__(self) -> None:
        self.clock = SaveClock(None, counts=True)
        self.begun: list[Noted] = []
        self.forgotten: list[int] = []

    def goes_beside(self) -> bool:
        return self.beside

    def forget(self, step: int) -> None:
        self.forgotten.append(step)

    def begin(self, step: int, before_commit: object) -> Noted:
        self.begun.append(Noted(step))
        return self.begun[-1]

    def settled(self, step: int) -> None:
        self.saved_step = step


def make_saves(check: Callable[[int], None] = lambda step: None) -> tuple[Saves, Any]:
    saver: Any = NotedSaver()
    stopwatch, heart = Stopwatch(), Heartbeat()
    return Saves(saver, lambda: 0, stopwatch, heart, None, lambda verdict, step: None, check=check), saver


def told(saving: int | None, **counts: int) -> tuple[Pending, Agreed]:
    agreed = Agreed(0.0, 0, 0, False, False, 0, num_ranks=2, **counts)  # type: ignore[arg-type]
    return Pending(None, None, agreed, saving=saving), agreed


def test_a_checkpoint_goes_on_only_by_what_was_agreed_of_it() -> None:
    saves, saver = make_saves()
    assert saves.standing() is NOTHING
    saves.hear(*told(None))
    saves.begin(2)
    (save,) = saver.begun
    save.written = True
    assert saves.standing() == Saving(2, written=True)
    for early in (told(None, written=2), told(1, written=2, committed=1), told(2, written=1)):
        saves.hear(*early)
    assert save.asked == [] and saves.standing().step == 2
    saves.hear(*told(2, written=2))
    assert save.asked == ["all_have_written"]
    saves.hear(*told(2, written=2, committed=1))
    assert saver.saved_step == 2 and saves.standing() is NOTHING and save.asked == ["all_have_written"]
    saves.hear(*told(2, written=2, committed=1))  # read again, or on CUDA a step later


def test_a_failure_is_heard_before_anything_else() -> None:
    saves, saver = make_saves()
    saves.begin(2)
    saves.hear(*told(2, written=2, committed=1, failed=1))
    assert saver.begun[0].asked == ["fail"] and saver.saved_step == -1


@pytest.mark.parametrize("way", ["beside", "at the end"])
def test_nothing_is_kept_of_what_may_not_be_and_what_was_begun_before_is(way: str) -> None:
    checked = list[int]()

    def check(step: int) -> None:
        checked.append(step)
        if step == 6:
            raise TaskError(NOT_ALIKE)

    saves, saver = make_saves(check)
    saves.begin(4)
    with pytest.raises(TaskError, match=NOT_ALIKE):
        saves.begin(6) if way == "beside" else saves.save_last(6)
    assert checked == [4, 6] and saver.saved_step == 4
    assert saver.begun[0].asked == ["settle"] and len(saver.begun) == 1


class NotedCopies:
    """In place of MemoryCopies."""

    def __init__(self, every: int) -> None:
        self.saver = NotedSaver()
        self._every = every

    def due(self, step: int) -> bool:
        return step % self._every == 0

    def obstacle(self) -> str:
        return ""


def with_copies(
    every: int, copied: int, check: Callable[[int], None] = lambda step: None
) -> tuple[Saves, Any, Any, list[str]]:
    """Saves that write to the disk every so many steps and to memory every so many, beside the steps."""
    saver: Any = NotedSaver()
    saver.due = lambda step: step % every == 0
    copies: Any = NotedCopies(copied)
    said = list[str]()
    tell: Any = lambda verdict, step: said.append(verdict.what)  # noqa: E731
    saves = Saves(saver, lambda: 0, Stopwatch(), Heartbeat(), None, tell, copies, check=check)
    return saves, saver, copies.saver, said


def test_what_is_due_in_both_places_goes_to_the_disk_and_a_copy_waits_for_nothing() -> None:
    saves, disk, memory, _ = with_copies(4, 1)
    for step in range(1, 5):
        saves.at_boundary(step)
    assert [save.step for save in memory.begun] == [1], "2 and 3 came while it was being written"
    assert memory.begun[0].asked == ["give_way"] and [save.step for save in disk.begun] == [4]
    saves.at_boundary(5)
    assert len(memory.begun) == 1 and saves.standing().step == 4
    saves.hear(*told(4, written=2, committed=1))
    saves.at_boundary(6)
    assert [save.step for save in memory.begun] == [1, 6] and (disk.saved_step, memory.saved_step) == (4, 1)


def test_nothing_is_kept_of_a_step_that_is_gone_back_from() -> None:
    def refuse(step: int) -> None:
        raise RollbackError("the loss is a spike")

    saves, disk, memory, _ = with_copies(4, 1, refuse)
    for step in (3, 4):
        with pytest.raises(RollbackError):
            saves.at_boundary(step)
    assert disk.begun == memory.begun == []


@pytest.mark.parametrize("last", [False, True])
def test_the_disk_does_not_wait_for_a_copy_and_nobody_calls_the_disk_slow(
    monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    monkeypatch.setattr("allranks.training.saves.SLOW_SECONDS", 0.0)
    saves, disk, memory, said = with_copies(4, 1)
    disk.tidy = disk.save = lambda *step: Path("step-4")
    saves.at_boundary(3)
    memory.begun[0].give_way = lambda: memory.begun[0].asked.append("give_way")  # and is not committed
    if last:
        saves.save_last(4)
    else:
        saves.at_boundary(4)
    assert memory.begun[0].asked == ["give_way"] and memory.saved_step == -1 and said == []


def test_who_is_not_the_newest_attempt_ends_and_deletes_nothing() -> None:
    saves, _, memory, said = with_copies(100, 1)
    saves.at_boundary(1)

    def fail() -> None:
        raise CheckpointError(f"step-1 is from attempt 3 of this run, this is attempt 2: {TAKEN_OVER}")

    memory.begun[0].fail = fail
    with pytest.raises(CheckpointError, match="a later one has taken over"):
        saves.hear(*told(1, failed=1))
    assert memory.forgotten == [] and said == []


@pytest.mark.parametrize("heard", [True, False])
def test_a_copy_that_fails_beside_the_steps_is_told_of_once_and_ends_nothing(heard: bool) -> None:
    saves, disk, memory, said = with_copies(100, 1)

    def fail() -> None:
        raise CheckpointError("step was not saved: rank 1: No space left on device")

    for step in (1, 2):
        saves.at_boundary(step)
        memory.begun[-1].fail = memory.begun[-1].give_way = fail
        if heard:
            saves.hear(*told(step, failed=1))
        else:
            saves.wait()
        assert saves.standing() is NOTHING
    assert memory.forgotten == [1, 2] and memory.saved_step == -1
    assert len(said) == 1 and "no copy of step 1" in said[0] and "rank 1: No space left" in said[0]
    saves.at_boundary(100)
    disk.begun[-1].settle = fail
    with pytest.raises(CheckpointError):
        saves.wait()
