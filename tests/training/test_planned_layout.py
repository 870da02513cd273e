"""A run without a layout: what is decided, in how little, and what falls back to ddp."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from allranks.cli.main import main
from allranks.errors import LayoutError
from allranks.layout import Layout
from allranks.plan import Choice
from allranks.planning import this_machine
from allranks.planning.answer import make_plan
from allranks.planning.this_machine import CONTEXT_BYTES
from allranks.reporting.report import report
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.stepping import profile
from allranks.surviving.aside import call_aside
from allranks.training import like_this_machine as like_this_machine_module
from allranks.training import planned_layout
from allranks.training.like_this_machine import like_this_machine
from allranks.training.planned_layout import Aside, Decided, decide_layout, settle
from allranks.training.prepare import Prepared, open_run, prepare, resolve_layout
from allranks.training.sketch import Sketch
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
WIDE = "task.width=100000"
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


def nobody(entry: str, *args: Any) -> Any:
    raise AssertionError("another process was asked")


def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine, its figures as if they had been measured."""
    guessed = like_this_machine(False, 2, 1)
    found = replace(guessed, device=replace(guessed.device, measured=True))
    monkeypatch.setattr(planned_layout, "like_this_machine", lambda *_, **__: found)


def decide(spec: str, *overrides: str, aside: Aside = here) -> tuple[Decided, Prepared]:
    prepared, request = prepared_of(spec, *overrides)
    return decide_layout(prepared, request, 2, aside), prepared


def test_a_small_state_is_ddp_with_figures() -> None:
    before = dict(os.environ)
    decided, prepared = decide(POINTS)
    assert dict(os.environ) == before
    assert decided.overrides == () and settle(prepared, decided).config is prepared.config
    (decision,) = decided.decisions
    assert decision.what == "layout dp_replicate=2, micro_batch 4" and decided.document is not None
    best = decided.document["best"]
    assert (best["layout"], best["micro_batch"], best["micro_steps"]) == ("dp_replicate=2", 4, 1)
    assert best["step_seconds"]["expected"] > 0 and best["peak_bytes"]["expected"] > 0
    assert decided.document["machine"] and decided.document["decided"] == []


def test_what_one_start_traced_the_next_one_knows(tmp_path: Path) -> None:
    """In the command's own process, and without the dataset; a change of the code asks again."""
    once = "hasattr(Normed, 'built') and 1 / 0; Normed.built = True; return [(torch.ones(4)"
    source = NORMED.replace("return [(torch.ones(4)", once)
    (tmp_path / "once.py").write_text(source)
    first, _ = decide("once.py")
    assert first.document is not None and first.document["best"]["seconds_by_cause"]["input"] > 0
    with patch("allranks.stepping.profile.trace_task", side_effect=AssertionError):
        again, _ = decide("once.py", aside=nobody)
    assert again == first
    (tmp_path / "once.py").write_text(source + "\n")
    with pytest.raises(AssertionError, match="another process was asked"):
        decide("once.py", aside=nobody)


@pytest.mark.parametrize("unnamed", ["", "nvidia-smi cannot be run"])
def test_gpus_that_nobody_names_are_not_planned_with_the_processors_figures(
    unnamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = this_machine.MachineFacts("Processor", 4, 16e9, (), unnamed)
    monkeypatch.setattr(this_machine, "look", lambda: facts)
    monkeypatch.setattr(like_this_machine_module, "look", lambda: facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    prepared, request = prepared_of(POINTS)
    decided = decide_layout(prepared, replace(request, device="auto"), 2, nobody)
    assert decided.overrides == () and decided.document is None
    (decision,) = decided.decisions
    assert decision.what == planned_layout.DEFAULT and decision.because.startswith("it could not be planned: ")
    assert f"nvidia-smi does not name the GPUs that torch sees{': ' if unnamed else ''}{unnamed}" in decision.because


def test_figures_that_are_a_guess_are_no_reason_to_leave_ddp() -> None:
    decided, _ = decide(POINTS, WIDE)
    assert decided.document is not None and decided.overrides == ()
    best, (other,) = decided.document["best"], decided.document["others"]
    assert best["layout"] == "dp_replicate=2" and other["layout"] == "tp=2"
    assert other["step_seconds"]["expected"] < 0.75 * best["step_seconds"]["expected"]
    assert "by figures that are a guess, until `allranks doctor --calibrate`" in decided.decisions[-1].because


def test_a_small_state_is_cut_where_measured_figures_say_that_this_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ddp would move the gradients of a product of few rows, which is over before that."""
    measured(monkeypatch)
    decided, prepared = decide(POINTS, WIDE)
    assert decided.document is not None
    best = decided.document["best"]
    assert best["layout"] == "tp=2" and decided.overrides and not best["because"].startswith("its step")
    config = settle(prepared, decided).config
    assert str(resolve_layout(config, 2)) == best["layout"] and config.layout.chosen
    (ddp,) = (other for other in decided.document["others"] if other["family"] == "ddp")
    assert best["step_seconds"]["expected"] < 0.95 * ddp["step_seconds"]["expected"]


def test_what_saves_less_than_predictions_err_is_no_reason_to_leave_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch)
    with patch.object(planned_layout, "make_plan", wraps=make_plan) as planned:
        decide(POINTS, WIDE)
        plan = make_plan(*planned.call_args.args)
    (ddp,) = (one.estimate for one in plan.others if one.family == "ddp")
    assert plan.best is not None
    for share, stays in ((0.96, True), (0.94, False)):
        step = replace(plan.best.estimate.step_seconds, expected=share * ddp.step_seconds.expected)
        best = replace(plan.best, estimate=replace(plan.best.estimate, step_seconds=step))
        with patch.object(planned_layout, "make_plan", return_value=replace(plan, best=best)):
            decided, _ = decide(POINTS, WIDE)
        assert (decided.overrides == ()) == stays
        assert ("less than 5% is no reason to leave it" in decided.decisions[-1].because) == stays


def test_a_large_state_is_planned_with_because() -> None:
    """With the fastest that fits, however small its lead over ddp."""
    prepared, request = prepared_of(POINTS, "task.width=4000000")
    machine = like_this_machine(False, 2, 1)
    memory = 3.0 * CONTEXT_BYTES
    small = replace(machine, device=replace(machine.device, memory_bytes=memory))
    assert 16 * 5 * 4_000_000 > planned_layout.OBVIOUS * small.device.memory_bytes < memory
    with patch.object(planned_layout, "like_this_machine", return_value=small):
        decided = decide_layout(prepared, request, 2, here)
    assert decided.document is not None
    best = decided.document["best"]
    config = settle(prepared, decided).config
    assert str(resolve_layout(config, 2)) == best["layout"] and config.layout.chosen
    if config.layout.dp_shard == "*":
        assert resolve_layout(config, 4).dp == 2 * resolve_layout(config, 2).dp  # a resume may have other processes
    assert config.train.micro_batch == best["micro_batch"]
    assert (config.train.global_batch, config.train.precision) == (8, prepared.config.train.precision)
    assert decided.document["decided"] == list(decided.overrides)
    assert decided.decisions[-1].what == f"layout {best['layout']}, micro_batch {best['micro_batch']}"
    assert decided.decisions[-1].because == best["because"]


def test_frozen_parameters_count_their_weights_alone() -> None:
    prepared, _ = prepared_of(POINTS)
    machine = like_this_machine(False, 2, 1)
    cluster = replace(machine, device=replace(machine.device, memory_bytes=4 * 1000.0))
    assert planned_layout._is_small(Sketch(175, 25, ""), prepared.config, cluster), "150 x 4 and 25 x 16 are 1000"
    assert not planned_layout._is_small(Sketch(175, 26, ""), prepared.config, cluster)


def test_on_several_hosts_a_small_state_stays_ddp_since_nobody_knows_what_joins_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guessed = like_this_machine(False, 4, 2)
    assert (guessed.nodes, guessed.devices_per_node, guessed.machine) == (2, 2, "")
    found = replace(guessed, device=replace(guessed.device, measured=True))
    monkeypatch.setattr(planned_layout, "like_this_machine", lambda *_, **__: found)
    prepared, request = prepared_of(POINTS, WIDE)
    decided = decide_layout(prepared, request, 4, here, 2)
    assert decided.overrides == () and decided.document is not None
    assert decided.document["best"]["layout"] == "dp_replicate=4"
    assert "by a guess of what joins the hosts, which `allranks plan --cluster" in decided.decisions[-1].because


def test_on_several_hosts_the_degree_that_spans_them_stays_open() -> None:
    prepared, request = prepared_of(POINTS, "task.width=4000000")
    machine = like_this_machine(False, 4, 2)
    small = replace(machine, device=replace(machine.device, memory_bytes=3.0 * CONTEXT_BYTES))
    with patch.object(planned_layout, "like_this_machine", return_value=small):
        decided = decide_layout(prepared, request, 4, here, 2)
    assert decided.document is not None and decided.overrides
    config = settle(prepared, decided).config
    assert str(resolve_layout(config, 4, 2)) == decided.document["best"]["layout"]
    choice = Choice(Layout(dp_replicate=2, dp_shard=2), 8, 2)
    words = planned_layout._overrides(choice, prepared.config, True, 2)
    assert words[:2] == ("layout.dp_replicate=*", "layout.dp_shard=2")


def test_hosts_of_other_numbers_are_not_planned() -> None:
    prepared, request = prepared_of(POINTS)
    decided = decide_layout(prepared, request, 3, nobody, 2)
    assert decided.overrides == () and decided.document is None
    assert "3 processes on 2 hosts are not the same number on each" in decided.decisions[0].because


def test_what_model_sets_in_the_environment_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server would start again for it."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def outline(*given: object) -> Sketch:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/somewhere"
        return Sketch(82, 82, "")

    prepared, request = prepared_of(POINTS)
    with patch.object(planned_layout, "sketch_of", outline):
        decide_layout(prepared, request, 2, lambda *given: Decided(()))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_model_that_uses_a_gpu_while_it_builds_is_left_to_another_process(tmp_path: Path) -> None:
    """Its context would lie on the GPU as long as the command runs."""
    (tmp_path / "touches_gpu.py").write_text(READS.replace("return torch.nn.Linear(4, width)", BUILDS_ON_GPU))
    asked: list[tuple[Any, ...]] = []
    prepared, request = prepared_of("touches_gpu.py")

    def elsewhere(entry: str, *args: Any) -> Decided:
        asked.append((entry, *args[1:]))
        return Decided(())

    with patch.object(torch.cuda, "_lazy_init", side_effect=AssertionError("CUDA was initialised here")) as init:
        assert decide_layout(prepared, request, 2, elsewhere) == Decided(())
        init.assert_not_called()
    assert asked == [("allranks.training.planned_layout:plan_layout", like_this_machine(False, 2, 1))]


@pytest.mark.full
def test_a_process_that_dies_over_a_plan_leaves_the_default() -> None:
    found, _ = decide(POINTS, aside=lambda *given: call_aside("os:_exit", 3))
    assert found.overrides == () and "ended first (exit code 3)" in found.decisions[0].because


def test_a_trace_that_takes_too_long_leaves_the_default_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dataset takes the time that it takes: half written, it would be what later runs train on."""
    monkeypatch.setattr(planned_layout, "LONGEST", 0.5)
    built = profile.load_first

    def build_slowly(task: Any) -> Any:
        time.sleep(1)
        return built(task)

    monkeypatch.setattr(profile, "load_first", build_slowly)
    monkeypatch.setattr(profile, "trace_task", lambda *given, **more: time.sleep(600))
    found, _ = decide(POINTS, aside=here)
    assert found.overrides == () and found.document is None
    assert "could not be planned: its trace took longer than 0.5 s" in found.decisions[0].because
    assert decide(POINTS, aside=nobody)[0] == found


def test_what_cannot_be_traced_is_not_traced_again(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS.replace("output.sum()", "output.sum() * output.sum().item()"))
    found, _ = decide("reads.py")
    assert "it could not be planned" in found.decisions[0].because and ".item()" in found.decisions[0].because
    assert decide("reads.py", aside=nobody)[0] == found


@pytest.mark.full
def test_a_run_without_a_layout_is_compared_and_goes_on(tmp_path: Path) -> None:
    words = ["train", POINTS, "train.global_batch=8", "train.steps=3", "--device", "cpu", "--run", "run"]
    assert main(words) == 0
    run = Run.open(tmp_path / "run")
    found = report(run)
    best = json.loads(run.plan_path.read_text())["best"]
    assert found.attempts[-1].layout == best["layout"] and found.predicted is not None
    assert found.predicted.differs == "" and found.predicted.step_seconds is not None
    assert found.predicted.step_seconds.expected == best["step_seconds"]["expected"]
    assert found.predicted.step_seconds.measured == found.step_seconds
    assert found.predicted.peak_bytes is not None and found.predicted.peak_bytes.ratio is not None
    assert main([*words, "train.steps=4"]) == 0
    again = report(Run.open(tmp_path / "run"))
    assert (again.step, again.attempts[-1].layout) == (4, best["layout"])


def test_the_plan_is_kept_and_holds_when_the_run_goes_on(tmp_path: Path) -> None:
    prepared, request = prepared_of(POINTS)
    words = ("layout.dp_shard=*", "train.micro_batch=2")
    decided = Decided((), words, {"decided": list(words)})
    run = tmp_path / "run"
    request = TrainRequest(task_spec=POINTS, overrides=request.overrides, run=run, device="cpu")
    made = open_run(settle(prepared, decided), request)
    assert json.loads(made.plan_path.read_text()) == decided.document
    made.journal().write_text('{"event": "step", "step": 1}\n')
    made.release()
    again = prepare(request)
    assert again.kept is not None and again.config.layout.dp_shard == "*" and again.config.train.micro_batch == 2
    other = prepare(replace(request, layout="ddp"))
    assert other.config.layout.dp_replicate == "*" and other.config.train.micro_batch == 2


def test_the_users_micro_batch_stays() -> None:
    decided, prepared = decide(POINTS, "train.micro_batch=2")
    assert decided.document is not None and decided.document["best"]["micro_batch"] == 2
    assert not any(word.startswith("train.") for word in decided.overrides)
    assert settle(prepared, decided).config.train.micro_batch == 2


def test_the_users_modes_stay() -> None:
    decided, _ = decide(POINTS, "layout.recompute=full")
    assert "every layout is refused: no part of Points repeats" in decided.decisions[0].because


def test_batch_statistics_leave_the_forwards_to_the_user(tmp_path: Path) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    decided, _ = decide("normed.py")
    assert decided.document is not None and decided.document["best"]["micro_steps"] == 1
    assert not any(word.startswith("train.") for word in decided.overrides)


def test_a_model_that_reads_a_value_while_it_builds_is_planned(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text(READS)
    decided, _ = decide("reads.py")
    assert decided.document is not None and decided.document["parameters"] == 180


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
    with refused:
        decided, _ = decide(POINTS)
    assert decided.overrides == () and "not this one" in decided.decisions[0].because
