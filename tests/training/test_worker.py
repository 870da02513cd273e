"""A worker from its first line to its exit code, with the directory that it leaves."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.cli import running
from allranks.cli.main import main
from allranks.errors import CheckpointError, ProcessError, TaskError
from allranks.parallel.backend import DeviceChoice
from allranks.reporting.report import report
from allranks.run import Run
from allranks.training import worker as worker_module
from allranks.verdict import Decision
from tests.checkpointing.worlds import counted_reads
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, TASKS, damage, events, losses, saved, start, train, train_outside

Capture = pytest.CaptureFixture[str]


def test_what_a_run_leaves(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4", "track.tensorboard=true") == 0
    (started,) = events(run, "start")
    assert (started["rank"], started["world_size"], started["layout"], started["attempt"]) == (0, 1, "single", 1)
    assert (started["pid"], started["total_steps"], started["device"]) == (os.getpid(), 4, "cpu")
    assert next(event["event"] for event in Run.open(run).events()) == "start"
    (ended,) = events(run, "end")
    assert (ended["reason"], ended["error"]) == ("done", None)
    assert {"forward_backward", "optimizer", "checkpoint", "evaluation"} <= ended["seconds"].keys()
    assert list(losses(run)) == [1, 2, 3, 4] and saved(run) == [4]
    assert list((run / "tensorboard").iterdir())
    shown = capsys.readouterr()
    assert "because" in shown.out and "done, every step was made" in shown.out and shown.err == ""
    assert "done, every step was made" in (run / "logs" / "rank-00000.log").read_text()


def test_memory_is_that_of_the_fullest_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "peak_memory_bytes", lambda *devices: 1000 * len(devices))
    monkeypatch.setattr(DeviceChoice, "devices", property(lambda _: (torch.device("cpu"),) * 2))
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4") == 0
    told = [event["memory_bytes"] for event in Run.open(run).events() if event.get("memory_bytes")]
    assert len(told) > 1 and set(told) == {2000}, "of the steps and of the end"


def test_the_steps_in_all_are_told_where_only_the_data_knows_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.epochs=2") == 0
    assert [event["total_steps"] for event in events(run, "start") + events(run, "plan")] == [None, 10]
    assert report(Run.open(run)).total_steps == 10
    assert start("Streamed", tmp_path / "endless", "train.epochs=1") == 0
    assert [event["total_steps"] for event in events(tmp_path / "endless", "plan")] == [None]
    assert report(Run.open(tmp_path / "endless")).total_steps is None


def test_an_error_ends_the_journal_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(TaskError, match="a mean over targets"):
        start("Broken", run, "train.steps=4", "task.wrong=mean")
    (ended,) = events(run, "end")
    assert ended["reason"] == "failed" and ended["error"].startswith("TaskError: Broken.loss returns a mean")
    assert not saved(run) and Run.open(run).holder() is None


def test_a_resume_says_where_it_goes_on(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4") == 0
    assert "resumed" not in capsys.readouterr().out
    assert train(None, "train.steps=6", resume=run) == 0
    shown = capsys.readouterr().out
    assert "resumed at step 4, sample 40, from step-00000004" in shown and "warning" not in shown
    (resumed,) = events(run, "resume")
    assert (resumed["step"], resumed["samples"], resumed["path"]) == (4, 40, "step-00000004")
    assert [event["attempt"] for event in events(run, "start")] == [1, 2]


def test_a_resume_reads_what_it_goes_on_from_twice_and_no_save_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2", "checkpoint.every=1", "checkpoint.keep=2") == 0
    path = run / "checkpoints" / "step-00000002" / "rank-00000.safetensors"
    with counted_reads() as (_, read):
        assert train(None, "train.steps=3", resume=run) == 0
    assert saved(run) == [2, 3] and read.count((path, 1)) == 2, "to see that it is good, and to take it"


def test_what_goes_on_otherwise_after_a_resume_is_announced(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2") == 0
    found = (Decision("some samples may be read twice", "there were other ranks"),)
    monkeypatch.setattr("allranks.training.snapshot.compare_circumstances", lambda *_: found)
    assert train(None, "train.steps=3", resume=run) == 0
    assert str(found[0]) in capsys.readouterr().out
    assert [event["because"] for event in events(run, "decision") if event["what"] == found[0].what] == [
        found[0].because
    ]


def test_a_damaged_checkpoint_is_passed_over_loudly(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4", "checkpoint.every=2") == 0
    damage(run, 4)
    capsys.readouterr()
    assert train(None, resume=run) == 0
    shown = capsys.readouterr().out
    assert "warning: passed over a newer checkpoint: " in shown and "step-00000004" in shown
    assert "resumed at step 2" in shown and events(run, "resume")[-1]["step"] == 2


def lose_the_seal(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "COMMITTED").unlink()


@pytest.mark.parametrize("harm", [lambda run: damage(run, 4), lose_the_seal], ids=["bytes", "COMMITTED"])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4") == 0
    harm(run)
    with pytest.raises(CheckpointError, match=r"no good checkpoint: .*step-00000004") as refused:
        train(None, resume=run)
    assert refused.value.exit_code == 78 and "\n" not in str(refused.value)
    assert saved(run) == [4] and len(events(run, "step")) == 4


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4") == 0
    assert "warning" not in capsys.readouterr().out
    before = losses(run)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert train(None, resume=run) == 0
    assert "warning: there is no checkpoint yet: the run starts from the beginning" in capsys.readouterr().out
    assert losses(run) == before and len(events(run, "step")) == 8


def test_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4") == 0
    with pytest.raises(CheckpointError, match=r"'model\.0\.weight' is float32\[6, 2\] in the checkpoint"):
        train(None, "task.width=7", resume=run, change=["task.width"])


@pytest.mark.distributed
def test_ranks_of_an_outside_launcher_share_the_run_that_rank_0_makes(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=3", run=run) == [0, 0]
    made = Run.open(run)
    assert made.ranks() == [0, 1] and made.attempts == 1 and list(losses(run)) == [1, 2, 3]
    assert [made.events(rank)[-1]["reason"] for rank in (0, 1)] == ["done", "done"]
    assert made.log(1).is_file() and made.holder() is None
    assert train_outside(pool, 3, None, "train.steps=5", resume=run, layout="fsdp") == [0, 0, 0]
    assert made.ranks() == [0, 1, 2] and Run.open(run).attempts == 2
    assert events(run, "start")[-1]["layout"] == "dp_shard=3" and list(losses(run)) == [1, 2, 3, 4, 5]


@pytest.mark.distributed
def test_ranks_of_an_outside_launcher_begin_anew_where_nothing_was_done(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused = train_outside(pool, 2, "Broken", *QUICK, "train.steps=3", "task.wrong=small", run=run)
    assert all(str(error).startswith("DataError") for error in refused)
    first = Run.open(run).id
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=2", run=run) == [0, 0]
    assert Run.open(run).id != first and Run.open(run).attempts == 1 and list(losses(run)) == [1, 2]
    (anew,) = [event for event in events(run, "decision") if "begins anew" in event["what"]]
    assert "Broken" in anew["because"] and "task.wrong small -> " in anew["because"]
    assert [event["attempt"] for event in Run.open(run).events(1) if event["event"] == "start"] == [1]


def test_what_cannot_be_deleted_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, rename: object) -> None:
        raise CheckpointError(f"{path} cannot be deleted: Operation not permitted")

    monkeypatch.setattr("allranks.checkpointing.retention.discard", refuse)
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=1") == 0
    (verdict,) = report(Run.open(run)).verdicts
    assert "step-00000001 cannot be deleted" in verdict.what and verdict.kind == "checkpoint"
    assert capsys.readouterr().out.count("warning: ") == 1 and saved(run) == [1, 2, 3, 4]


@pytest.mark.distributed
def test_what_rank_0_cannot_do_is_refused_by_all(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2") == 0
    holder = Run.open(run)
    holder.acquire()
    try:
        first, second = train_outside(pool, 2, None, "train.steps=5", resume=run)
    finally:
        holder.release()
    assert first == second and str(first).startswith("RunError: ") and "in use by pid" in str(first)
    damage(run, 2)
    first, second = train_outside(pool, 2, None, "train.steps=5", resume=run)
    assert first == second and "CheckpointError" in str(first) and "no good checkpoint" in str(first)
    assert [Run.open(run).events(rank)[-1]["reason"] for rank in (0, 1)] == ["failed", "failed"]


def command(folder: Path, *arguments: str) -> int:
    """In a worker of an outside launcher: `allranks train ARGUMENTS`, what reaches file descriptor 1 and 2 in files."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    vars(running)["end_process"] = lambda code: None  # this process has to answer yet
    code = main(["train", f"{TASKS}:Noisy", *arguments])
    sys.stdout.flush()  # as the end of a process does
    return code


@pytest.mark.distributed
def test_json_is_the_only_thing_on_standard_output(pool: Pools, tmp_path: Path) -> None:
    settings = (*QUICK, "train.steps=3", "--run", str(tmp_path / "run"), "--json")
    assert pool(2).run_alone(command, tmp_path, *settings) == [0, 0]
    document = json.loads((tmp_path / "out-0").read_text())
    assert (document["reason"], document["step"], document["exit_code"]) == ("done", 3, 0)
    assert document["run"] == str(tmp_path / "run") and 0 <= document["validation"]["accuracy"] <= 1
    assert (tmp_path / "out-1").read_text() == ""
    errors = (tmp_path / "err-0").read_text()
    assert "the model is made" in errors and "written below Python" in errors and "because" in errors
    assert "the model is made" in Run.open(tmp_path / "run").log(1).read_text()

    refused = pool(2).run_alone(command, tmp_path, *settings, "train.seed=4")
    assert refused == [78, 78] and "train.seed" in (tmp_path / "err-0").read_text()


@pytest.mark.distributed
def test_an_outside_launcher_may_ask_what_would_run(pool: Pools, tmp_path: Path) -> None:
    settings = (*QUICK, "train.steps=3", "--run", str(tmp_path / "run"), "--show", "--json")
    assert pool(2).run_alone(command, tmp_path, *settings) == [0, 0]
    shown = json.loads((tmp_path / "out-0").read_text())
    assert shown["cut"]["samples per rank"] == [5, 5] and (tmp_path / "out-1").read_text() == ""
    assert {"what": "2 processes", "because": "so many were started (torchrun)"} in shown["decisions"]
    assert not (tmp_path / "run").exists()


def test_a_worker_of_an_attempt_before_is_none_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=2") == 0
    attempts = Run.open(run).attempts
    for told in ("0", str(attempts)):
        monkeypatch.setenv("ALLRANKS_ATTEMPT", told)
        worker_module._check_attempt(Run.open(run))
    monkeypatch.setenv("ALLRANKS_ATTEMPT", str(attempts + 1))
    with pytest.raises(ProcessError, match=f"this worker is of attempt {attempts + 1}; attempt {attempts} of .* has"):
        worker_module._check_attempt(Run.open(run))
