"""How many processes are started where nobody says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.observing.journal import Journal
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training.choose_processes import choose_processes, last_world_size
from allranks.training.planned_layout import Decided, settle
from allranks.training.prepare import open_run, prepare
from tests.training.runs import TASKS

FIRST = TrainRequest(task_spec=f"{TASKS}:Curve", overrides=("train.steps=9", "train.global_batch=10"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that made a step and ended."""
    request = replace(FIRST, run=tmp_path / "run")
    opened = open_run(prepare(request), request)
    opened.release()
    journal = Journal(opened.journal())
    journal.write("step", step=1)
    journal.close()
    return tmp_path / "run"


def choice(request: TrainRequest) -> tuple[int, str]:
    """How many processes, and why."""
    number, decision = choose_processes(prepare(request), request)
    return number, decision.because


def test_how_many_processes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choice(replace(FIRST, nproc=5)) == (5, "--nproc says so")
    number, because = choice(FIRST)
    assert number == 2 and "no GPU" in because
    assert choice(replace(FIRST, layout="single"))[0] == 1
    number, because = choice(replace(FIRST, layout="dp_replicate=2,dp_shard=3"))
    assert number == 6 and "asks for it" in because
    assert choice(replace(FIRST, layout="dp_shard=*"))[0] == 2
    number, because = choice(replace(FIRST, overrides=("train.global_batch=1",)))
    assert number == 1 and "train.global_batch=1" in because

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choice(FIRST) == (4, "this machine has 4 GPU(s)")
    assert choice(replace(FIRST, device="cpu"))[0] == 2


@pytest.mark.parametrize(
    ("decided", "number"), [(("layout.dp_shard=*",), 3), (("layout.tp=2", "layout.dp_shard=*"), 4)]
)
def test_a_planned_run_that_has_not_started_has_no_process_without_a_sample(
    decided: tuple[str, ...], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first workers failed before they had said that they start; tp=2 gives two of them the same samples."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    request = replace(FIRST, overrides=("train.global_batch=3",), run=tmp_path / "run")
    assert choice(request)[0] == 3
    open_run(settle(prepare(request), Decided((), decided, {"decided": list(decided)})), request).release()
    again = TrainRequest(resume=tmp_path / "run")
    assert prepare(again).config.layout.chosen and choice(again)[0] == number
    assert choice(replace(again, layout="dp_replicate=*"))[0] == 4, "what somebody names is not cut"


def test_a_resume_takes_as_many_processes_as_before(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    request = TrainRequest(resume=run)
    assert last_world_size(Run.open(run)) == 0 and choice(request)[0] == 2
    journal = Journal(Run.open(run).journal(0))
    for world_size in (5, 3):
        journal.write("start", world_size=world_size)
    journal.close()
    assert choice(request) == (3, "that is how many it had before")
    assert choice(replace(request, nproc=1))[0] == 1
    assert choice(replace(request, layout="single"))[0] == 1
    journal = Journal(Run.open(run).journal(0))
    journal.write("start", world_size=3, layout="dp_replicate=3")
    damages: list[dict[str, Any]] = [{}, {"world_size": "3"}, {"world_size": 0}, {"world_size": 9}]
    for members in damages:
        journal.write("start", **{"layout": "dp_replicate=3", **members})
    journal.write("start", world_size=3, layout="dp_replicat=3")
    journal.close()
    number, because = choice(request)
    assert number == 3 and "5 damaged start event(s) in" in because
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choice(request)[0] == 2, "three processes do not fit on two GPUs"
