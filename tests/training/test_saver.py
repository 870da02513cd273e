"""Who writes a run's checkpoints: what is proven, what is kept, what may fail."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from allranks.checkpointing.retention import bytes_in
from allranks.checkpointing.stage import Stage
from allranks.config import CheckpointConfig
from allranks.errors import CheckpointError, TaskError
from allranks.training.saver import Saver
from tests.checkpointing.worlds import counted_reads
from tests.distributed.sessions import config_of
from tests.training.runs import flip_a_byte
from tests.training.snapshots import contents_of, find, noting, saver_of
from tests.training.tasks import Curve

# Their names are replaced below, which a type checker would only allow for names that they export.
retention_module: Any = importlib.import_module("allranks.checkpointing.retention")
saver_module: Any = importlib.import_module("allranks.training.saver")
portion_module: Any = importlib.import_module("allranks.checkpointing.portion")

SMALL = ("train.global_batch=10", "optimizer.lr=0.05")


def test_the_first_save_is_read_back_and_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    saver, calls = saver_of(session, contents, tmp_path, keep=9), list[Path]()
    real = saver_module.check_files
    monkeypatch.setattr(saver_module, "check_files", noting(calls, lambda found: found.path, real))
    for step in (1, 2, 3):
        assert saver.save(step) == tmp_path / f"step-{step:08d}" and saver.saved_step == step
    assert calls == [tmp_path / "step-00000001"]


def test_a_writer_that_writes_something_else_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    real = portion_module.write_file
    monkeypatch.setattr(
        portion_module, "write_file", lambda path, tensors, *rest: real(path, [(p, t + 1) for p, t in tensors], *rest)
    )
    with pytest.raises(CheckpointError, match="differ from their digests"):
        saver_of(session, contents, tmp_path).save(1)


def test_when_a_checkpoint_is_due(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    assert [step for step in range(9) if saver_of(session, contents, tmp_path, every=4).due(step)] == [0, 4, 8]
    assert not saver_of(session, contents, tmp_path).due(4)


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver = saver_of(session, contents, tmp_path, keep=2)
    for step in range(1, 5):
        saver.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize("beside", [False, True])
def test_some_stay_for_ever_and_a_quota_takes_of_the_others(tmp_path: Path, beside: bool) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    one = bytes_in(saver_of(session, contents, tmp_path / "one").save(1))
    told, most = list[str](), list[int]()
    room: dict[str, Any] = {"quota_gb": 4.5 * one / 1e9, "keep": 3, "keep_every": 4, "asynchronous": beside}
    saver = Saver(contents, session.processes, CheckpointConfig(**room), tmp_path / "run", "run", 1, told.append)
    kept = []
    for step in range(1, 10):
        if beside:
            saver.begin(step, lambda: most.append(bytes_in(tmp_path / "run"))).settle()
            saver.settled(step)
        else:
            saver.save(step)
        kept.append([int(path.name[-2:]) for path in sorted((tmp_path / "run").iterdir())])
    assert kept[2] == [1, 2, 3] and kept[3] == [2, 3, 4] and kept[4] == [3, 4, 5] and kept[5] == [4, 5, 6]
    assert kept[6:] == [[4, 5, 6, 7], [4, 6, 7, 8], [4, 7, 8, 9]], "before 8 is written 5 goes"
    assert all(bytes_taken <= 4.5 * one for bytes_taken in most) and not told


def test_what_a_quota_cannot_hold_is_told_and_saved_and_the_last_good_one_stays(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    told = list[str]()
    config = CheckpointConfig(quota_gb=1e-8, keep=3)
    saver = Saver(contents, session.processes, config, tmp_path, "run", 1, told.append)
    for step in (1, 2, 3):
        saver.save(step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert len(told) == 3 and "with the checkpoint of step 3 " in told[2] and "checkpoint.quota_gb=1e-08" in told[2]
    flip_a_byte(tmp_path / "step-00000003")
    for step in (4, 5):
        saver_of(session, contents, tmp_path, quota_gb=1e-6, keep=3).save(step)
        assert (tmp_path / f"step-{step:08d}").is_dir()


def test_before_a_save_a_quota_takes_none_for_a_damaged_one(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    for step in (1, 2):
        saver_of(session, contents, tmp_path, keep=3).save(step)
    flip_a_byte(tmp_path / "step-00000002")
    saver = saver_of(session, contents, tmp_path, keep=3, quota_gb=1e-6)
    refusal = CheckpointError("step-00000003 was not saved")
    with mock.patch.object(saver_module, "save", side_effect=refusal), pytest.raises(CheckpointError):
        saver.save(3)
    assert (tmp_path / "step-00000001").is_dir(), "it is the last good one"


def test_what_a_dead_writer_left_goes_without_a_save(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver = saver_of(session, contents, tmp_path, keep=2)
    for step in (1, 2):
        saver.save(step)
    for name in (".trash-step-00000000-ab", "step-00000003.tmp-run_1"):
        (tmp_path / name).mkdir()
    saver_of(session, contents, tmp_path, keep=1).tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_what_another_run_wrote_does_not_take_the_place_of_ours(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    Saver(contents, session.processes, CheckpointConfig(keep=1), tmp_path, "another", 1).save(9)
    saver = saver_of(session, contents, tmp_path, keep=1)
    for step in (1, 2):
        saver.save(step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000009"]


def test_what_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    told = list[str]()
    saver = Saver(contents, session.processes, CheckpointConfig(keep=1), tmp_path, "run", 1, told.append)

    def refuse(path: Path, rename: object) -> None:
        raise CheckpointError(f"{path} cannot be deleted: Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(retention_module, "discard", refuse)
        assert [saver.save(step).name for step in (1, 2, 3)] == [f"step-{step:08d}" for step in (1, 2, 3)]
        assert len(told) == 1 and "step-00000001 cannot be deleted" in told[0] and "the run goes on" in told[0]
        saver_of(session, contents, tmp_path, keep=1).save(4)  # without anybody to tell, as in an own loop
        assert "warning: " in capsys.readouterr().err
    saver.save(5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"], "it is tried again"
    monkeypatch.setattr(retention_module, "discard", refuse)
    for step in (6, 7):
        saver.save(step)
    assert len(told) == 2 and "step-00000005 cannot be deleted" in told[1], "what comes after is told of again"


class Keeping(Curve):
    """Wants to remember what no checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 3, "statistics": {"mean": torch.zeros(2)}}


def test_what_cannot_be_kept_is_refused_before_the_first_save(tmp_path: Path) -> None:
    session, contents = contents_of(Keeping(), config_of("single", *SMALL), 0)
    with pytest.raises(TaskError, match=r"state_dict\(\)\.statistics\.mean: a torch\.Tensor .*tolist\(\)"):
        saver_of(session, contents, tmp_path)
    other = replace(contents, task=None, extra={"mine": {1, 2}})
    with pytest.raises(TaskError, match=r"mine: a builtins\.set cannot be kept"):
        saver_of(session, other, tmp_path)


def test_what_this_run_wrote_is_not_read_again_at_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    read, real = list[str](), saver_module.verify_files
    monkeypatch.setattr(saver_module, "verify_files", noting(read, lambda found: found.path.name, real))
    monkeypatch.setattr(saver_module, "READ_BYTES", 0)
    before = saver_of(session, contents, tmp_path, keep=3)
    for step in (1, 2, 3):
        before.save(step)
    saver = saver_of(session, contents, tmp_path, keep=3)  # of the next attempt
    for step in (4, 5, 6):
        saver.save(step)
    assert read == ["step-00000003", "step-00000002"], "each once, however many saves it outlives"
    damaged = tmp_path / "step-00000005" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    saver.save(7)
    assert (tmp_path / "step-00000004").exists(), "it stays in the place of the one that lost a byte"


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_run_goes_on_from_is_not_read_again(tmp_path: Path, beside: bool) -> None:
    """Neither because nobody of this attempt has written it, nor as the oldest that stays: the resume has read it."""
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    before = saver_of(session, contents, tmp_path, keep=2)
    for step in (1, 2):
        before.save(step)
    found = find(tmp_path, session)
    saver = saver_of(session, contents, tmp_path, keep=2, asynchronous=beside)
    saver.go_on_from(found)
    assert saver.saved_step == 2
    with counted_reads() as (_, read):
        if beside:
            saver.begin(3, lambda: None).settle()
            saver.settled(3)
        else:
            saver.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert not [path for path, _ in read if path.parent == found.path]


@pytest.mark.parametrize("beside", [False, True])
def test_before_one_goes_the_oldest_that_stays_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    read, real = list[int](), saver_module.verify_files
    monkeypatch.setattr(saver_module, "verify_files", noting(read, lambda found: found.step, real))
    saver = saver_of(session, contents, tmp_path, keep=2, asynchronous=beside)

    def save(step: int) -> None:
        if beside:
            saver.begin(step, lambda: None).settle()
            saver.settled(step)
        else:
            saver.save(step)

    for step in (1, 2, 3, 4):
        save(step)
        saver.tidy()
    assert read == [2, 3]
    flip_a_byte(tmp_path / "step-00000004")
    save(5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in (3, 4, 5)]
    assert read == [2, 3, 4], "the 3 had been read"
    memory = saver.in_memory(tmp_path / "memory")
    for step in (5, 6):
        memory.save(step)
    assert read == [2, 3, 4], "copies in memory are not the last to go on from"


def test_a_copy_that_fails_is_told_as_a_writer_that_fails(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver = saver_of(session, contents, tmp_path, asynchronous=True)
    refusal = CheckpointError("no memory for a copy of 5.1 kB")
    with mock.patch.object(Stage, "copy", side_effect=refusal):
        save = saver.begin(1, lambda: None)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not saved: rank 0: no memory for a copy of 5\.1 kB"):
        save.settle()
    saver.begin(2, lambda: None).settle()
    saver.settled(2)
    assert saver.saved_step == 2 and [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_only_the_first_of_a_start_is_proven_beside_too(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    saver, proven = saver_of(session, contents, tmp_path, asynchronous=True), list[bool]()
    real = Stage.copy

    def copy(stage: Stage, portion: Any, *, proves: bool) -> Any:
        proven.append(proves)
        return real(stage, portion, proves=proves)

    with mock.patch.object(Stage, "copy", copy):
        for step in (1, 2, 3):
            saver.begin(step, lambda: None).settle()
            saver.settled(step)
    assert proven == [True, False, False]


def test_where_checkpoints_are_written_beside_the_steps(tmp_path: Path) -> None:
    assert [CheckpointConfig(asynchronous=choice).beside("cpu") for choice in ("auto", True, False)] == [0, 1, 0]
    assert [CheckpointConfig(asynchronous=choice).beside("cuda") for choice in ("auto", True, False)] == [1, 1, 0]
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    assert saver_of(session, contents, tmp_path, every=2).decisions == ()
    saver = saver_of(session, contents, tmp_path, every=2)
    saver.beside = True  # as on CUDA
    (decision,) = saver.decisions
    assert str(decision).startswith("checkpoints are written beside the steps, because a copy in the host's memory")


def test_one_that_comes_by_time_is_waited_for_unless_the_config_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for it: its copy must not be what a host's memory is too small for."""
    monkeypatch.setattr(CheckpointConfig, "beside", lambda saves, kind: saves.asynchronous is not False)  # as on CUDA
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 0)
    ways: list[dict[str, Any]] = [{}, {"asynchronous": True}, {"every": 2}, {"seconds": 0}, {"memory_every": 2}]
    savers = [saver_of(session, contents, tmp_path, **way) for way in ways]
    assert [saver.beside for saver in savers] == [False, True, True, True, False]
    assert savers[-1].in_memory(tmp_path).beside, "a copy that was asked for"


def test_a_host_without_room_for_the_copy_saves_while_the_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the copy is made, and once for both savers, which copy into the same memory."""
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    said, asked = list[str](), list[list[int]]()
    answers = iter(["a copy takes 9 GB, and 1 GB is free", ""])

    def find(of_ranks: list[int], processes: object) -> str:
        asked.append(of_ranks)
        return next(answers)

    monkeypatch.setattr(saver_module, "find_shortage", find)
    for beside in (False, True):
        config = CheckpointConfig(every=1, memory_every=1, asynchronous=True)
        saver = Saver(contents, session.processes, config, tmp_path, "run", 1, said.append)
        memory = saver.in_memory(tmp_path / "memory")
        assert [saver.goes_beside(), saver.goes_beside(), memory.goes_beside()] == [beside] * 3
        assert (saver.beside, memory.beside) == (beside, beside)
    assert asked == [saver.bytes_of_ranks()] * 2
    assert said == ["checkpoints are written while the training waits for them: a copy takes 9 GB, and 1 GB is free"]
    waiting = saver_of(session, contents, tmp_path, asynchronous=False)
    assert not waiting.goes_beside() and len(asked) == 2


def test_what_one_takes_is_known_before_it_is_written(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    saver = saver_of(session, contents, tmp_path)
    told = sum(saver.bytes_of_ranks())
    written = [load_file(path) for path in saver.save(1).glob("*.safetensors")]
    assert told == sum(tensor.nbytes for tensors in written for tensor in tensors.values()) > 0


def test_copies_in_memory_are_the_same_runs_with_a_rhythm_of_their_own(tmp_path: Path) -> None:
    session, contents = contents_of(Curve(), config_of("single", *SMALL), 1)
    disk = saver_of(session, contents, tmp_path / "disk", every=10, keep=5, keep_every=1, quota_gb=1.0, memory_every=3)
    memory = disk.in_memory(tmp_path / "memory")
    assert [step for step in range(1, 13) if memory.due(step)] == [3, 6, 9, 12] and disk.due(10)
    ours, theirs = (json.loads((saver.save(1) / "manifest.json").read_text()) for saver in (memory, disk))
    assert ours == theirs
    memory.save(2)
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["step-00000002"]
    memory.forget(2)
    memory.forget(3)
    assert list((tmp_path / "memory").iterdir()) == [] and (tmp_path / "disk" / "step-00000001").is_dir()
