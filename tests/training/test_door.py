"""The second door: the listing of the design computes what a plain loop computes, under every layout and launcher."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import allranks
from allranks.checkpointing.checkpoint import newest_good
from allranks.checkpointing.restore import read_whole
from allranks.digest import ledger_sum
from allranks.errors import ConfigError, LayoutError
from allranks.run import Run
from allranks.verifying.parity import compare
from allranks.verifying.reference import ReferenceStep
from tests.distributed.pool import Pools
from tests.processes import wait_until
from tests.training.own.cases import batches, own_loop, plain, with_journal

# World size, layout, cut. 37 samples in batches of 10 end in a step of 7; 8 over 3 ranks by one makes fillers.
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "single", {"global_batch": 10, "micro_batch": 4}),
    (2, "ddp", {"global_batch": 10}),
    (2, "ddp", {"global_batch": 10, "micro_batch": 2, "epochs": 2}),
    (3, "ddp", {"global_batch": 8, "micro_batch": 1}),
    (3, "ddp", {"global_batch": 3, "micro_steps": 2, "steps": 4}),
    (2, "dp_shard=2", {"global_batch": 10}),
    (2, "dp_shard=2", {"global_batch": 10, "micro_batch": 2}),
    (2, "dp_shard=2,sharding=grad_op", {"global_batch": 9, "micro_batch": 2}),
    (2, "dp_replicate=2,sharding=none", {"global_batch": 10, "micro_batch": 2}),
    (3, "dp_shard=3,sharding=optimizer", {"global_batch": 10, "micro_batch": 2}),
    (2, "tp=2", {"global_batch": 10, "micro_batch": 3}),
    (4, "tp=2,dp_shard=2", {"global_batch": 9, "micro_batch": 2}),
]


def plain_steps(max_norm: float | None, cutting: dict[str, Any]) -> list[ReferenceStep]:
    """The plain loop, in a process of the pool: torch's optimizers leave traces in the environment."""
    return plain(max_norm, **cutting)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("size", "layout", "cutting"), CASES, ids=str)
@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_it_computes_what_one_device_computes(
    pool: Pools, tmp_path: Path, size: int, layout: str, cutting: dict[str, Any], max_norm: float | None
) -> None:
    folder = tmp_path / "run"
    ranks = pool(size).run(lambda: own_loop(str(folder), layout, max_norm=max_norm, **cutting), timeout=240)
    ranks = [with_journal(steps, folder) for steps in ranks]
    reference = pool(1).run(plain_steps, max_norm, cutting)[0]
    assert len(ranks[0]) == len(reference) > 2
    if max_norm is not None:  # what the optimizer sees is clipped, what the reference keeps is not
        assert reference[0].norm > max_norm
        reference = [replace(step, gradients={}) for step in reference]
        ranks = [[replace(step, gradients={}) for step in steps] for steps in ranks]
    assert [str(difference) for difference in compare(ranks, reference)] == []
    _, fed = batches(**cutting)
    expected = [f"{ledger_sum(positions, samples):016x}" for positions, samples in fed]
    assert [step.ledger for step in ranks[0]] == expected


def test_two_joins_at_once() -> None:
    with allranks.join() as world:
        assert (world.rank, world.local_rank, world.size, str(world.device)) == (0, 0, 1, "cpu")
        with pytest.raises(ConfigError, match=r"rank 0 of 1 on cpu.* already: leave that world's `with` first"):
            allranks.join()
    with allranks.join(layout="single") as world:
        assert world.size == 1


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"layout": "dp_shard=2"}, LayoutError, r"dp_shard\(2\).* = 2, but the world has 1 process"),
        ({"layout": "ddp", "precision": "bf16"}, ConfigError, "expected float32, bfloat16, float16 or float64"),
        ({"gather": "bfloat16"}, ConfigError, "it belongs to train.precision=bfloat16"),
        ({"layout": "placement", "placement": {"0": "cpu:9"}}, LayoutError, "cpu:9"),
        ({"layout": "dpp"}, ConfigError, "dpp"),
        ({"layout": "pp=2"}, LayoutError, "pp"),
        ({"keep": 0}, ConfigError, "checkpoint.keep"),
    ],
)
def test_a_wrong_argument_leaves_nothing_behind(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        allranks.join(**arguments)
    allranks.join().close()  # this process is free


def test_a_group_that_the_script_has_started_is_used_and_left(pool: Pools) -> None:
    import torch.distributed as dist

    def case() -> tuple[int, bool]:
        with allranks.join() as world:
            size = world.size
        return size, dist.is_initialized()

    assert pool(2).run(case) == [(2, True)] * 2


def test_a_group_of_its_own_is_ended(pool: Pools) -> None:
    import torch.distributed as dist

    def case() -> tuple[int, bool, bool]:
        with allranks.join() as world:
            inside = dist.is_initialized()
        return world.size, inside, dist.is_initialized()

    assert pool(2).run_alone(case, timeout=120) == [(2, True, False)] * 2


def test_the_seed_decides_what_is_built_next() -> None:
    def first(seed: int) -> float:
        with allranks.join(seed=seed):
            return float(torch.rand(()))

    assert first(1) == first(1) != first(2)


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import allranks

def train(folder, steps, layout=None):
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with allranks.join(layout=layout, seed=4, precision="float64", run=folder) as world:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        model = world.parallelize(net)
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.01)
        stream = world.stream(TensorDataset(x, x.sum(dim=1, keepdim=True)), global_batch=8, micro_batch=3, steps=steps)
        world.resume(model, optimizer, stream)
        for inputs, outputs in stream:
            loss = (model(inputs) - outputs).square().sum()
            world.backward(loss, targets=len(inputs))
            world.step(optimizer, max_norm=1.0)
            world.save(every=1000)
            world.log(loss=loss)
    return world.rank, world.size, stream.step

if __name__ == "__main__":
    folder, steps, nproc = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if nproc:
        print(allranks.launch(train, folder, steps, nproc=nproc, layout="dp_shard=2"))
    else:
        print(train(folder, steps))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


def begin(script: Path, *before: str, run: str, steps: int, nproc: int = 0) -> subprocess.Popen[str]:
    """The script in a real process, in its own folder."""
    return subprocess.Popen(
        [sys.executable, *before, str(script), run, str(steps), str(nproc)],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def trained(script: Path, run: str) -> dict[str, torch.Tensor]:
    """The last checkpoint, whole."""
    opened = Run.open(script.parent / run)
    checkpoint, _ = newest_good(opened.checkpoints, opened.id)
    assert checkpoint is not None
    return read_whole(checkpoint)


@pytest.mark.full
@pytest.mark.distributed
def test_one_script_alone_under_torchrun_and_launched(script: Path) -> None:
    started = {
        "alone": begin(script, run="alone", steps=12),
        "torchrun": begin(script, *TORCHRUN, run="torchrun", steps=12),
        "launched": begin(script, run="launched", steps=12, nproc=2),
    }
    printed = {}
    for name, process in started.items():
        printed[name], errors = process.communicate(timeout=280)
        assert process.returncode == 0, f"{name}\n{errors}"
    assert printed["alone"] == "(0, 1, 12)\n"
    assert "(0, 2, 12)" in printed["torchrun"]  # two processes write to one pipe: their newlines may both come last
    assert printed["launched"] == "[(0, 2, 12), (1, 2, 12)]\n"
    layouts = [Run.open(script.parent / name).events()[0]["layout"] for name in started]
    assert layouts == ["single", "dp_replicate=2", "dp_shard=2"]
    expected = trained(script, "alone")
    for name in ("torchrun", "launched"):
        found = trained(script, name)
        assert found.keys() == expected.keys()
        assert all(torch.allclose(found[key], value, rtol=1e-11, atol=1e-13) for key, value in expected.items())
    assert [Run.open(script.parent / name).name for name in started] == ["mine", "mine", "own-loop"]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("before", "number", "code"),
    [
        ((), signal.SIGINT, 130),
        ((), signal.SIGTERM, 75),
        (TORCHRUN, signal.SIGINT, 1),
    ],
)
def test_a_stop_saves_and_a_second_start_goes_on(
    script: Path, before: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    journal = script.parent / "run" / "journal" / "rank-00000.jsonl"
    process = begin(script, *before, run="run", steps=100_000)
    wait_until(lambda: journal.exists() and '"step"' in journal.read_text(), seconds=200)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == code, errors
    run = Run.open(script.parent / "run")
    reached = run.last_step
    assert 0 < reached < 100_000
    assert [path.name for path in run.checkpoints.glob("step-*")] == [f"step-{reached:08d}"]
    assert [run.events(rank)[-1]["reason"] for rank in run.ranks()] == ["stopped"] * (2 if before else 1)
    again = begin(script, *before, run="run", steps=reached + 2)
    _, errors = again.communicate(timeout=200)
    assert again.returncode == 0, errors
    assert f"resumed at step {reached}" in errors.replace(",", "")
    assert [step["step"] for step in Run.open(script.parent / "run").steps()] == list(range(1, reached + 3))
