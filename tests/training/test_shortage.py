"""Memory that runs out in a step: smaller forwards of the same step, or the advice."""

import json
from pathlib import Path

import pytest
import torch

from allranks.config import Config
from allranks.data.cut import Cut
from allranks.failure import describe_error, is_out_of_memory
from allranks.layout import Layout
from allranks.run import Run
from allranks.training.shortage import explain_shortage, halve, samples_per_forward
from tests.commands import PROGRAMS, allranks
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny
from tests.stepping.test_guards import Normed

HUNGRY = str(PROGRAMS / "hungry.py")
QUICK = ("train.global_batch=24", "train.steps=4", "checkpoint.every=1", "evaluate.every=0", "track.tensorboard=false")


def sizes(config: Config, layout: Layout) -> list[int | None]:
    """The micro-batch of every attempt to come."""
    found, left = list[int | None](), halve(config, layout)
    while left is not None:
        found.append(left.train.micro_batch)
        left = halve(left, layout)
    return found


def test_forwards_are_halved_down_to_one_sample() -> None:
    alone, two = (Layout.resolve(config_of("ddp").layout, size) for size in (1, 2))
    assert sizes(config_of("ddp", "train.global_batch=24"), alone) == [12, 6, 3, 1]
    assert sizes(config_of("ddp", "train.global_batch=24"), two) == [6, 3, 1]
    assert sizes(config_of("ddp", "train.global_batch=24", "train.micro_batch=5"), alone) == [2, 1]
    assert sizes(config_of("ddp", "train.global_batch=24", "train.micro_steps=4"), alone) == [3, 1]
    assert sizes(config_of("ddp", "train.global_batch=24", "train.micro_batch=1"), alone) == []


def test_a_pipeline_takes_the_next_size_that_fits_its_schedule() -> None:
    config = config_of("pp=2", "train.global_batch=18", "train.micro_steps=2")
    assert sizes(config, Layout.resolve(config.layout, 2)) == [3, 1], "four do not divide eighteen"


def test_what_fails_for_want_of_memory() -> None:
    with pytest.raises(RuntimeError) as real:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(real.value) and is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    nccl = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error. Last error:\nCuda failure 2 'out of memory'"
    assert is_out_of_memory(torch.distributed.DistBackendError(nccl))
    assert is_out_of_memory(torch.AcceleratorError("CUDA error: out of memory"))
    assert not is_out_of_memory(torch.distributed.DistBackendError("NCCL error: remote process exited"))
    assert not is_out_of_memory(RuntimeError("out of patience")) and not is_out_of_memory(ValueError())


def test_a_worker_says_whether_its_step_can_be_divided() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
    cut = ("train.global_batch=12", "train.micro_steps=2")
    told = explain_shortage(session_of(Tiny(), config_of("single", *cut)), error)
    assert told.divisible and "6 sample(s) a forward on each rank (CUDA out of memory. Tried)" in str(told)
    failure = describe_error(told, 0)
    assert failure.divisible and failure.exit_code == 1 and failure.message == str(told)
    single = explain_shortage(
        session_of(Tiny(), config_of("single", "train.global_batch=4", "train.micro_batch=1")), error
    )
    assert not single.divisible and "a forward has no fewer" in str(single)
    assert "one has nobody to share with" in str(told) and "or a layout that shards more" not in str(told)
    normed = explain_shortage(session_of(Normed(), config_of("single", *cut)), error)
    assert not normed.divisible and "`--change train.micro_steps train.micro_steps=4`" in str(normed)
    assert samples_per_forward(Cut(24, 2, 5)) == 4


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_goes_on_with_smaller_forwards_and_the_same_samples(tmp_path: Path) -> None:
    allranks("train", HUNGRY, "--nproc", "2", "--run", "calm", *QUICK, folder=tmp_path)
    ran = allranks("train", HUNGRY, "--nproc", "2", "--run", "hungry", *QUICK, "task.fits=5", folder=tmp_path)
    calm, hungry = Run.open(tmp_path / "calm"), Run.open(tmp_path / "hungry")
    assert hungry.config().train.micro_batch == 3 and hungry.config().train.global_batch == 24
    told = [event for event in hungry.events() if event["event"] == "verdict"]
    assert [one["kind"] for one in told] == ["out_of_memory"] * 2
    assert "it goes on with train.micro_batch=6" in told[0]["what"] and "train.micro_batch=3" in told[1]["what"]
    assert "CUDA out of memory" in told[0]["what"] and "it goes on with train.micro_batch=3" in ran.stderr
    for one, other in zip(calm.steps(), hungry.steps(), strict=True):
        assert one["ledger"] == other["ledger"] and one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("workers", [0, 1])
def test_memory_that_a_sample_takes_ends_the_run_with_the_sample(tmp_path: Path, workers: int) -> None:
    words = ("task.heavy=50", f"data.workers={workers}")
    ran = allranks("train", HUNGRY, "--nproc", "2", "--run", "run", *QUICK, *words, folder=tmp_path, check=1)
    run = Run.open(tmp_path / "run")
    assert run.attempts == 1 and not [event for event in run.events() if event["event"] == "verdict"]
    assert "while loading sample 50 (position " in ran.stderr and "MemoryError" in ran.stderr
    assert "rank 0 on " in ran.stderr or "rank 1 on " in ran.stderr


@pytest.mark.full
@pytest.mark.distributed
def test_a_run_with_batch_statistics_ends_with_the_advice(tmp_path: Path) -> None:
    words = ("task.fits=5", "task.normed=true", "--json")
    ran = allranks("train", HUNGRY, "--nproc", "2", "--run", "run", *QUICK, *words, folder=tmp_path, check=1)
    assert "`--change train.micro_steps train.micro_steps=2`" in json.loads(ran.stdout)["error"]
    assert Run.open(tmp_path / "run").config().train.micro_batch is None
