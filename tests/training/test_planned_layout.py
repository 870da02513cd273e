"""A run without a layout: what is decided, in how little, and what falls back to ddp."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from allranks.cli.main import main
from allranks.errors import LayoutError
from allranks.reporting.report import report
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.surviving.aside import call_aside
from allranks.training import planned_layout
from allranks.training.plan_kept import write_plan
from allranks.training.planned_layout import Decided, apply, decide_layout
from allranks.training.prepare import Prepared, open_run, prepare, resolve_layout
from tests.commands import POINTS

NORMED = """
import torch
from torch import nn
import allranks

class Normed(allranks.Task):
    def dataset(self, split):
        return [(torch.ones(4) * n, torch.tensor(n % 2)) for n in range(32)]
    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    def loss(self, output, batch):
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")
"""
BUILDS_ON_GPU = "return torch.nn.Linear(4, width).cuda()"
READS = """
import torch
import allranks

class Reads(allranks.Task):
    def dataset(self, split):
        return [(torch.ones(4), torch.tensor(1))] * 32
    def model(self):
        width = int(torch.linspace(1, 8, 8).sum().item())
        return torch.nn.Linear(4, width)
    def loss(self, output, batch):
        return output.sum()
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it when its compiler is imported
    monkeypatch.chdir(tmp_path)


def prepared_of(spec: str, *overrides: str) -> tuple[Prepared, TrainRequest]:
    request = TrainRequest(task_spec=spec, overrides=("train.global_batch=8", *overrides), device="cpu")
    return prepare(request), request


def here(entry: str, *args: Any) -> Any:
    """What another process would answer, asked in this one."""
    assert entry == "allranks.training.planned_layout:plan_layout"
    return planned_layout.plan_layout(*args)


def decide(spec: str, *overrides: str) -> tuple[Decided, Prepared]:
    prepared, request = prepared_of(spec, *overrides)
    return decide_layout(prepared, request, 2, here), prepared


def test_a_small_state_keeps_ddp_and_is_never_traced(tmp_path: Path) -> None:
    with patch("allranks.stepping.profile.trace_task", side_effect=AssertionError):
        decided, prepared = decide(POINTS)
    assert decided.overrides == () and apply(prepared.config, decided) is prepared.config
    (decision,) = decided.decisions
    assert decision.what == "layout dp_replicate=2"
    assert "82 parameters (1.3 kB) obviously fits" in decision.because
    assert decided.document is not None and decided.document["best"]["layout"] == "dp_replicate=2"
    assert not (tmp_path / "XDG_CACHE_HOME").exists()


def test_a_large_state_is_planned_with_because() -> None:
    before = dict(os.environ)
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        decided, prepared = decide(POINTS)
    assert dict(os.environ) == before
    assert decided.document is not None
    best = decided.document["best"]
    config = apply(prepared.config, decided)
    assert str(resolve_layout(config, 2)) == best["layout"] and config.layout.chosen
    assert resolve_layout(config, 4).dp == 2 * resolve_layout(config, 2).dp  # a resume may have other processes
    assert config.train.micro_batch == best["micro_batch"]
    assert (config.train.global_batch, config.train.precision) == (8, prepared.config.train.precision)
    assert decided.document["decided"] == list(decided.overrides)
    assert decided.decisions[-1].what == f"layout {best['layout']}, micro_batch {best['micro_batch']}"
    assert decided.decisions[-1].because == best["because"]


def test_what_model_sets_in_the_environment_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server would start again for it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def count(*given: object) -> int:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/somewhere"
        return 82

    with patch.object(planned_layout, "count_parameters", count):
        decide(POINTS)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_model_that_uses_a_gpu_while_it_builds_is_left_to_another_process(tmp_path: Path) -> None:
    """Its context would lie on the GPU as long as the command runs. There it may be counted, and need no trace."""
    (tmp_path / "touches_gpu.py").write_text(READS.replace("return torch.nn.Linear(4, width)", BUILDS_ON_GPU))
    asked: list[tuple[Any, ...]] = []
    prepared, request = prepared_of("touches_gpu.py")

    def elsewhere(entry: str, *args: Any) -> Decided:
        asked.append((entry, *args[1:]))
        return Decided(())

    with patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError("CUDA was initialised here")) as init:
        assert decide_layout(prepared, request, 2, elsewhere) == Decided(())
        init.assert_not_called()
    assert asked == [("allranks.training.planned_layout:plan_layout", 2, False, True)]
    counted = patch.object(planned_layout, "count_parameters", return_value=82)
    with counted, patch.object(planned_layout, "_planned", side_effect=AssertionError):
        found = planned_layout.plan_layout(request, 2, False, True)
    assert "82 parameters (1.3 kB) obviously fits" in found.decisions[0].because


def test_a_process_that_dies_over_a_plan_leaves_the_default() -> None:
    prepared, request = prepared_of(POINTS)
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        found = decide_layout(prepared, request, 2, lambda *given: call_aside("os:_exit", 3))
    assert found.overrides == () and "ended first (exit code 3)" in found.decisions[0].because


def test_a_planned_run_trains_is_compared_and_goes_on(tmp_path: Path) -> None:
    words = ["train", POINTS, "train.global_batch=8", "train.steps=3", "--device", "cpu", "--run", "run"]
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        assert main(words) == 0
    run = Run.open(tmp_path / "run")
    found = report(run)
    best = json.loads(run.plan_path.read_text())["best"]
    assert found.attempts[-1].layout == best["layout"] and found.predicted is not None
    assert found.predicted.differs == "" and found.predicted.step_seconds is not None
    assert found.predicted.step_seconds.expected == best["step_seconds"]["expected"]
    assert found.predicted.step_seconds.measured == found.step_seconds
    assert main([*words, "train.steps=4"]) == 0
    again = report(Run.open(tmp_path / "run"))
    assert (again.step, again.attempts[-1].layout) == (4, best["layout"])


def test_the_plan_is_kept_and_holds_when_the_run_goes_on(tmp_path: Path) -> None:
    prepared, request = prepared_of(POINTS)
    words = ("layout.dp_shard=*", "train.micro_batch=2")
    decided = Decided((), words, {"decided": list(words)})
    run = tmp_path / "run"
    request = TrainRequest(task_spec=POINTS, overrides=request.overrides, run=run, device="cpu")
    made = open_run(replace(prepared, config=apply(prepared.config, decided)), request)
    assert decided.document is not None
    write_plan(made, decided.document)
    made.journal().write_text('{"event": "step", "step": 1}\n')
    made.release()
    again = prepare(request)
    assert again.kept is not None and again.config.layout.dp_shard == "*" and again.config.train.micro_batch == 2
    other = prepare(replace(request, layout="ddp"))
    assert other.config.layout.dp_replicate == "*" and other.config.train.micro_batch == 2


def test_the_users_micro_batch_stays() -> None:
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        decided, prepared = decide(POINTS, "train.micro_batch=2")
    assert decided.document is not None and decided.document["best"]["micro_batch"] == 2
    assert not any(word.startswith("train.") for word in decided.overrides)
    assert apply(prepared.config, decided).train.micro_batch == 2


def test_the_users_modes_stay() -> None:
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        decided, _ = decide(POINTS, "layout.recompute=full")
    assert "every layout is refused: no part of Points repeats" in decided.decisions[0].because


def test_a_plan_builds_the_dataset_once(tmp_path: Path) -> None:
    """One that can be read a single time, or takes minutes to build, is loaded for trace and timing together."""
    once = "hasattr(Normed, 'built') and 1 / 0; Normed.built = True; return [(torch.ones(4)"
    (tmp_path / "once.py").write_text(NORMED.replace("return [(torch.ones(4)", once))
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        decided, _ = decide("once.py")
    assert decided.document is not None and decided.document["best"]["seconds_by_cause"]["input"] > 0


def test_batch_statistics_leave_the_forwards_to_the_user(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    with patch.object(planned_layout, "OBVIOUS", 0.0):
        decided, _ = decide("normed.py")
    assert decided.document is not None and decided.document["best"]["micro_steps"] == 1
    assert not any(word.startswith("train.") for word in decided.overrides)


def test_a_model_that_reads_a_value_while_it_builds_is_counted(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS)
    decided, _ = decide("reads.py")
    assert "180 parameters" in decided.decisions[0].because


def test_what_cannot_be_built_is_ddp_with_because_and_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS.replace("return torch.nn", "raise ValueError('mine')"))
    decided, _ = decide("reads.py")
    (decision,) = decided.decisions
    assert decided.overrides == () and decided.document is None
    assert decision.what == "layout ddp, the default"
    assert "it could not be planned" in decision.because and "mine" in decision.because


def test_a_key_that_no_plan_weighs_is_ddp_with_because() -> None:
    for key in ("static_graph=true", "sharding=grad_op"):
        decided, _ = decide(POINTS, f"layout.{key}")
        assert decided.decisions[0].because == f"layout.{key.partition('=')[0]} is set, which a plan does not weigh"


def test_a_planned_layout_that_would_be_refused_is_ddp_with_because() -> None:
    refused = patch.object(planned_layout, "resolve_layout", side_effect=LayoutError("not this one"))
    with patch.object(planned_layout, "OBVIOUS", 0.0), refused:
        decided, _ = decide(POINTS)
    assert decided.overrides == () and "not this one" in decided.decisions[0].because
