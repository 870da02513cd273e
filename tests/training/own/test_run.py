"""The Run directory of an own loop: who may continue it, who may not, and what rank 0 says for all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.config import Config
from allranks.errors import RunError, TaskError
from allranks.parallel.backend import DeviceChoice
from allranks.request import TrainRequest
from allranks.run import Run
from allranks.training.own import run as own_run
from allranks.training.prepare import prepare
from tests.distributed.pool import Pools
from tests.training.own.cases import Net, Samples, count, loss_of, refusal, sgd


def train(folder: str, join: dict[str, Any], stream: dict[str, Any], resume: bool = False) -> str:
    """A loop of three steps; what it was refused with."""

    def loop() -> None:
        with allranks.join(**{"precision": "float64", "run": folder, **join}) as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            batches = world.stream(Samples(), **{"global_batch": 10, "steps": 3, **stream})
            if resume:
                world.resume(model, optimizer, batches)
            for batch in batches:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)

    return refusal(loop)


def test_a_new_run_is_named_after_the_script(pool: Pools, tmp_path: Path) -> None:
    def case() -> tuple[str, str | None]:
        import os

        os.chdir(tmp_path)
        with allranks.join(precision="float64") as world:
            model = world.parallelize(Net())
            optimizer = world.optimizer(model, sgd)
            # Rank 0 makes it, and may be there before another rank has looked.
            nothing_yet = world.directory is None and (world.rank > 0 or not Path("runs").exists())
            stream = world.stream(Samples(), global_batch=10, steps=1)
            world.resume(model, optimizer, stream)
            for batch in stream:
                world.backward(loss_of(model, batch), targets=count(batch))
                world.step(optimizer)
            return str(world.directory), None if nothing_yet else "too early"

    ranks = pool(2).run_alone(case, timeout=120)
    (path,) = (tmp_path / "runs").iterdir()
    run = Run.open(path)
    assert [early for _, early in ranks] == [None, None]
    assert [(tmp_path / found).resolve() for found, _ in ranks] == [path, path]
    assert run.name == "worker"
    assert run.task.endswith("tests/distributed/worker.py (own loop)")
    assert (run.config().train.global_batch, run.config().train.steps, run.config().train.precision) == (
        10,
        1,
        "float64",
    )
    assert run.config().checkpoint.every_seconds is None, "the loop itself says when it saves"
    for ask in (lambda: allranks.load(path), lambda: prepare(TrainRequest(resume=path))):
        with pytest.raises(TaskError, match="names no Task") as caught:  # nobody runs the script to find one
            ask()
        assert f'worker.py again with join(run="{path}")' in str(caught.value)
        assert f"`allranks checkpoint export {path} model.safetensors`" in str(caught.value)


def test_memory_is_that_of_the_fullest_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_run, "peak_memory_bytes", lambda *devices: 1000 * len(devices))
    monkeypatch.setattr(DeviceChoice, "devices", property(lambda _: (torch.device("cpu"),) * 2))
    assert train(str(tmp_path / "run"), {}, {}) == "nothing was refused"
    told = [event["memory_bytes"] for event in Run.open(tmp_path / "run").events() if event.get("memory_bytes")]
    assert len(told) > 1 and set(told) == {2000}, "of the steps and of the end"


def test_what_may_change_and_what_has_to_be_said(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert pool(1).run(train, folder, {}, {}) == ["nothing was refused"]
    assert pool(2).run(train, folder, {"layout": "dp_shard=2", "keep": 5}, {"steps": 4}) == ["nothing was refused"] * 2
    refused = pool(2).run(train, folder, {}, {"global_batch": 12, "seed": 3})
    assert (
        refused
        == [
            f"RunError: {folder} was started with another configuration: train.global_batch 10 -> 12, "
            "train.seed 0 -> 3; keep it, or say join(..., change=['train.global_batch', 'train.seed'])"
        ]
        * 2
    )
    said = {"change": ["train.global_batch", "train.seed"]}
    assert pool(2).run(train, folder, said, {"global_batch": 12, "seed": 3}) == ["nothing was refused"] * 2
    run = Run.open(Path(folder))
    assert (run.attempts, run.config().train.global_batch) == (3, 12)
    assert [step["step"] for step in run.steps()] == [1, 2, 3]


def test_another_global_batch_counts_steps_on(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert pool(1).run(train, folder, {}, {}, True) == ["nothing was refused"]
    said = {"change": ["train.global_batch"]}
    assert pool(2).run(train, folder, said, {"global_batch": 4, "steps": 5}, True) == ["nothing was refused"] * 2
    steps = Run.open(Path(folder)).steps()
    assert [(step["step"], step["samples"]) for step in steps] == [(1, 10), (2, 20), (3, 30), (4, 34), (5, 38)]


def test_a_run_without_a_checkpoint_starts_again_and_says_so(pool: Pools, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    told = "warning: there is no checkpoint yet: the run starts from the beginning"
    for resume in (False, True):
        assert pool(1).run(train, folder, {}, {}, resume) == ["nothing was refused"]
        assert (told in Run.open(Path(folder)).log().read_text()) is resume


def test_another_s_directory_is_refused_on_every_rank(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    task = Run.create(tmp_path, "digits", Config(), {"task": "/a/task.py:Digits"}, directory=tmp_path / "task")
    other = Run.create(tmp_path, "x", Config(), {"task": "/a/other.py (own loop)"}, directory=tmp_path / "other")
    held = Run.create(tmp_path, "x", Config(), {"task": "/a/worker.py (own loop)"}, directory=tmp_path / "held")
    (held.path / "config.toml").write_text('[train]\nsteps = 3\nglobal_batch = 10\nprecision = "float64"\n')
    held.acquire()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "run.json").write_text("{")

    def said(path: Path) -> str:
        first, second = pool(2).run(train, str(path), {}, {}, timeout=120)
        assert first == second
        return str(first)

    try:
        assert said(tmp_path / "full").startswith(f"RunError: {tmp_path / 'full'} is not empty")
        assert said(task.path) == (
            f"RunError: {task.path} is a run of /a/task.py:Digits, not of worker.py: name another directory"
        )
        assert "is a run of /a/other.py (own loop), not of worker.py" in said(other.path)
        assert "torn/run.json cannot be read" in said(tmp_path / "torn")
        changed = said(held.path)
        assert "is in use by pid" in changed
    finally:
        held.release()
    assert json.loads((task.path / "run.json").read_text())["attempts"] == 0


def test_the_error_of_rank_0_is_everybody_s(pool: Pools, tmp_path: Path) -> None:
    def case() -> None:
        raise RunError(train(str(tmp_path / "file" / "run"), {}, {}))

    (tmp_path / "file").write_text("no directory")
    with pytest.raises(RunError, match=r"RunError: .*file"):
        pool(2).run(case)
