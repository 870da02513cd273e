"""What ranks settle among themselves where another launcher has started them."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from allranks.parallel.backend import DeviceChoice
from allranks.process_environment import ProcessEnvironment
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training import planned_layout, without_agent
from allranks.training.planned_layout import Decided
from allranks.training.prepare import open_run, prepare
from allranks.training.without_agent import plan_together, settle_together
from tests.commands import POINTS
from tests.distributed.pool import Pools
from tests.training.runs import QUICK, events, losses, train_outside

pytestmark = pytest.mark.distributed


def test_rank_0_decides_the_layout_and_all_train_under_it(
    pool: Pools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=3", run=run, plans=True) == [0, 0]
    plan = json.loads(Run.open(run).plan_path.read_text())
    (told,) = [event for event in events(run, "decision") if event["what"].startswith("layout ")]
    assert told["what"].startswith(f"layout {plan['best']['layout']}, micro_batch") and told["because"]
    assert events(run, "start")[-1]["layout"] == plan["best"]["layout"] and list(losses(run)) == [1, 2, 3]
    assert train_outside(pool, 2, None, "train.steps=5", resume=run, plans=True) == [0, 0]
    assert json.loads(Run.open(run).plan_path.read_text()) == plan, "what goes on is not planned again"


def test_who_names_a_layout_is_not_planned(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train_outside(pool, 2, "Curve", *QUICK, "train.steps=2", run=run, layout="fsdp", plans=True) == [0, 0]
    assert not Run.open(run).plan_path.exists() and events(run, "start")[-1]["layout"] == "dp_shard=2"


@pytest.mark.parametrize(
    ("own_device", "backend", "own"), [(True, "gloo", True), (False, "nccl", True), (False, "gloo", False)]
)
def test_a_plan_counts_gpus_that_rank_0_is_not_shown_where_each_has_its_own(
    own_device: bool, backend: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm says so, or NCCL was chosen, which takes no two processes on one GPU."""
    asked: list[dict[str, Any]] = []

    def decide(*given: Any, **more: Any) -> Decided:
        asked.append(more)
        return Decided(())

    monkeypatch.setattr(planned_layout, "decide_layout", decide)
    monkeypatch.setattr(without_agent, "share", lambda told, device: told)
    rank = replace(ProcessEnvironment("slurm", 0, 0, 8, 8), own_device=own_device)
    choice = DeviceChoice(torch.device("cuda", 0), backend, None, ())
    request = TrainRequest(task_spec=POINTS)
    plan_together(prepare(request), request, rank, choice, lambda *_: None)
    assert asked == [{"here": False, "own_gpus": own}]


def test_what_the_other_ranks_wait_for_is_told_where_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lasting = [0.6, 0.0]

    def decide(*given: Any, **more: Any) -> Decided:
        time.sleep(lasting.pop())
        return Decided(())

    monkeypatch.setattr(planned_layout, "decide_layout", decide)
    monkeypatch.setattr(without_agent, "share", lambda told, device: told)
    monkeypatch.setattr(without_agent, "TELL_SECONDS", 0.3)
    choice = DeviceChoice(torch.device("cpu"), "gloo", None, ())
    request = TrainRequest(task_spec=POINTS)
    prepared = prepare(request)
    while lasting:
        plan_together(prepared, request, ProcessEnvironment("slurm", 0, 0, 8, 8), choice, lambda *_: None)
    (line,) = capfd.readouterr().err.splitlines()
    assert f"the other ranks wait for it up to {prepared.config.guard.longest_wait:g} s" in line


def test_who_has_not_seen_the_run_that_rank_0_goes_on_with_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS remembers that a name was not there; its rank would wait for a plan that nobody makes."""
    request = TrainRequest(task_spec=POINTS, overrides=("train.steps=9",), run=tmp_path / "run")
    stale = prepare(request)
    words = ("layout.dp_shard=*",)
    made = open_run(planned_layout.settle(stale, Decided((), words, {"decided": list(words)})), request)
    made.journal().write_text('{"event": "step", "step": 1}\n')
    made.release()
    awaited: list[Path] = []
    monkeypatch.setattr(without_agent, "await_run", awaited.append)
    monkeypatch.setattr(without_agent, "share", lambda told, device: {"kept": True, "is_open": False})
    choice = DeviceChoice(torch.device("cpu"), "gloo", None, ())
    rank = ProcessEnvironment("slurm", 1, 0, 2, 1, 1, 2)
    assert stale.is_open and stale.kept is None
    settled = settle_together(stale, request, rank, choice, lambda *_: None)
    assert awaited == [request.run] and settled.kept is not None and settled.config.layout.dp_shard == "*"


def test_who_sees_a_run_takes_part_where_rank_0_begins_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then rank 0 cannot make it, and all hear that."""
    request = TrainRequest(task_spec=POINTS, run=tmp_path / "run")
    seen = replace(prepare(request), unnamed=False)
    told = iter([{"kept": False, "is_open": True}, {"overrides": [], "document": None, "decisions": [["x", "y"]]}])
    monkeypatch.setattr(without_agent, "share", lambda mine, device: next(told))
    choice = DeviceChoice(torch.device("cpu"), "gloo", None, ())
    rank = ProcessEnvironment("slurm", 1, 0, 2, 1, 1, 2)
    settled = settle_together(seen, request, rank, choice, lambda *_: None)
    assert [str(one) for one in settled.decisions] == ["x, because y"]
