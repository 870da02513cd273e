"""What an own loop says when it starts."""

from pathlib import Path

import pytest

import allranks
from allranks.run import Run
from tests.training.own.cases import Net, Samples, count, loss_of, sgd


def test_the_start_is_told_once_on_the_screen_and_in_the_journal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with allranks.join(precision="float64", run=tmp_path / "run") as world:
        model = world.parallelize(Net())
        optimizer = world.optimizer(model, sgd)
        for batch in world.stream(Samples(), global_batch=10, micro_batch=4):
            world.backward(loss_of(model, batch), targets=count(batch))
            world.step(optimizer)
    said = capfd.readouterr().err
    assert said.count("Decided:") == 1 and said.count(f"The run lies in {tmp_path / 'run'}") == 1
    for line in ("global batch (samples per step)  10", "steps in all                     4", "per step)  3"):
        assert line in said
    decisions = [event["what"] for event in Run.open(tmp_path / "run").events() if event["event"] == "decision"]
    assert decisions == ["device cpu"] and "  - device cpu, because " in said


def test_an_argument_that_has_no_effect_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with allranks.join(precision="float64", run=tmp_path / "run", context="ring", powersgd_rank=2) as world:
        model = world.parallelize(Net())
        optimizer = world.optimizer(model, sgd)
        for batch in world.stream(Samples(), global_batch=10):
            world.backward(loss_of(model, batch), targets=count(batch))
            world.step(optimizer)
    said = capfd.readouterr().err
    assert "layout.context has no effect, because it is for cp, and this layout has none" in said
    assert "layout.powersgd_rank has no effect, because it is for layout.ddp_hook=powersgd" in said
