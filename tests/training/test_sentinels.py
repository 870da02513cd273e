"""Bugs of users and of machines, in whole runs: each is found, named and followed by what the config says."""

from pathlib import Path

import pytest

from allranks.training.sentinels import Sentinels
from tests.distributed.pool import Pools
from tests.distributed.sessions import config_of, session_of
from tests.distributed.tasks import Tiny
from tests.training.runs import events, same_run, saved, start, train_outside

SMALL = ("train.global_batch=10", "train.steps=12", "guard.digest_every=2", "checkpoint.every=2", "evaluate.every=0")


@pytest.mark.distributed
def test_a_flipped_bit_ends_the_run(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refusals = train_outside(pool, 3, "Flipping", *SMALL, "task.flip_at=12", run=run, layout="ddp")
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "replicas_differ" and step in (4, 6, 8, 10)
    for told in refusals:
        assert str(told).startswith(f"GuardError: after step {step} rank 2 ("), told
        assert "0.weight" in str(told) and f"resume from a checkpoint of step {step - 2} or before" in str(told)
        assert "guard.mute=replicas silences this sentinel" in str(told)
    assert saved(run) == [step - 4, step - 2][step == 4 :], "what is not alike is not saved"


@pytest.mark.sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("settings", "before"),
    [
        (("checkpoint.every=2",), 2),
        (("checkpoint.every=2", "checkpoint.asynchronous=true"), 2),
        (("checkpoint.every=1", "checkpoint.keep=9"), 1),
        (("checkpoint.every=100",), 12),
    ],
    ids=["every second step", "beside the steps", "every step", "the last one alone"],
)
def test_copies_are_compared_before_each_save(
    pool: Pools, tmp_path: Path, settings: tuple[str, ...], before: int
) -> None:
    """The flip lies between two rounds, or behind the last one; what is saved was alike, and is gone on from."""
    run, small = tmp_path / "run", (*SMALL, "guard.digest_every=100", *settings)
    refusals = train_outside(pool, 3, "Flipping", *small, "task.flip_at=12", run=run, layout="ddp")
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "replicas_differ" and all(str(told).startswith("GuardError: after ") for told in refusals)
    alike = max(1, step - before)
    assert f"at step {alike} all were alike" in verdict["evidence"], "since that save, or the first round"
    assert max(saved(run), default=0) == step - before, "neither is what is not alike saved, nor does a good one go"


@pytest.mark.distributed
def test_a_copy_in_memory_is_compared_too(pool: Pools, tmp_path: Path) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    memory.mkdir()
    (memory / "lease").touch()
    settings = (*SMALL, "guard.digest_every=100", "checkpoint.every=100", "checkpoint.memory_every=2")
    train_outside(pool, 3, "Flipping", *settings, "task.flip_at=12", run=run, layout="ddp", memory=memory)
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "replicas_differ" and step < 12
    assert [one["step"] for one in events(run, "checkpoint")] == list(range(2, step, 2)) and saved(run) == []


@pytest.mark.distributed
def test_buffers_that_nobody_broadcasts_end_the_run(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refusals = train_outside(pool, 2, "Tracking", *SMALL, run=run, layout="ddp")
    for told in refusals:
        assert "buffer 1.mean" in str(told) and str(told).startswith("GuardError: after step "), told
    (verdict,) = events(run, "verdict")
    assert max(saved(run), default=0) < verdict["step"] <= 6


@pytest.mark.distributed
def test_a_setting_of_one_rank_ends_the_run_before_it_is_saved(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refusals = train_outside(pool, 2, "Settling", *SMALL, "guard.digest_every=0", run=run, layout="ddp")
    assert all("the ranks no longer make the same steps: rank 0 has weight_decay" in str(told) for told in refusals)
    (verdict,) = events(run, "verdict")
    assert verdict["kind"] == "steps_differ"
    assert 0 < max(saved(run)) < verdict["step"]


@pytest.mark.distributed
def test_a_warning_lets_it_go_on_and_is_not_repeated(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (*SMALL, "guard.on_finding=warn", "guard.mute=replicas")
    assert train_outside(pool, 2, "Settling", *settings, run=run, layout="ddp") == [0, 0]
    (verdict,) = events(run, "verdict")
    assert verdict["kind"] == "steps_differ" and verdict["what"].endswith("the run goes on")
    assert saved(run)[-1] == 12


@pytest.mark.distributed
def test_a_scheduler_of_its_own_is_told_of_once(pool: Pools, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = (*SMALL, "train.micro_batch=2")
    assert train_outside(pool, 2, "Scheduling", *settings, run=run, layout="ddp") == [0, 0]
    (verdict,) = events(run, "verdict")
    assert verdict["kind"] == "rate_moved" and verdict["step"] <= 3
    assert "on rank 0, 1" in verdict["evidence"]


def test_alone_too_and_it_may_stop(tmp_path: Path) -> None:
    assert start("Scheduling", tmp_path / "warned", "train.steps=6", "evaluate.every=0") == 0
    assert [one["kind"] for one in events(tmp_path / "warned", "verdict")] == ["rate_moved"]
    settings = ("train.steps=6", "evaluate.every=0", "checkpoint.every=3", "guard.on_finding=stop")
    with pytest.raises(Exception, match="something besides the schedule moves the learning rate") as raised:
        start("Scheduling", tmp_path / "stopped", *settings)
    assert raised.value.exit_code == 93  # type: ignore[attr-defined]
    assert saved(tmp_path / "stopped") == []


def test_what_is_muted_says_nothing(tmp_path: Path) -> None:
    settings = ("train.steps=6", "evaluate.every=0", "guard.mute=linkage, schedule")
    assert start("Scheduling", tmp_path / "run", *settings) == 0
    assert events(tmp_path / "run", "verdict") == []


def test_a_layer_that_is_made_anew_is_told_of(tmp_path: Path) -> None:
    settings = ("train.steps=12", "evaluate.every=0", "guard.digest_every=4")
    assert start("Replacing", tmp_path / "run", *settings) == 0
    (verdict,) = events(tmp_path / "run", "verdict")
    assert verdict["kind"] == "optimizer_unlinked" and verdict["step"] == 8
    assert "the model has another tensor for 3.weight" in verdict["what"]


@pytest.mark.parametrize("task", ["Curve", "OwnOptimizer", "Slowing", "Normed", "Tied", "Gan", "Streamed"])
def test_a_run_in_which_nothing_is_wrong_is_silent(task: str, tmp_path: Path) -> None:
    settings = ("train.epochs=1",) if task == "Streamed" else ("train.steps=6", "train.ema=0.9")
    assert start(task, tmp_path / "run", *settings, "guard.digest_every=1", "guard.on_finding=stop") == 0
    assert events(tmp_path / "run", "verdict") == []


def sentinels(*overrides: str) -> Sentinels:
    return Sentinels(session_of(Tiny(), config_of("single", *overrides)), lambda verdict, step: None)


def test_when_it_is_due() -> None:
    often, never = sentinels("guard.digest_every=3"), sentinels("guard.digest_every=0")
    assert [step for step in range(5, 13) if often.due(step)] == [5, 6, 9, 12], "the first step of a process, too"
    assert not any(never.due(step) for step in range(1, 7))
    assert not sentinels("guard.mute=linkage,samples").due(1), "one rank has nothing else to compare"


AGAIN = ("train.global_batch=12", "train.steps=6", "guard.recompute_every=2", "checkpoint.every=1", "checkpoint.keep=9")


@pytest.mark.distributed
def test_a_device_that_computes_wrongly_is_named_by_its_neighbours(pool: Pools, tmp_path: Path) -> None:
    """It is wrong in the same way each time: to itself it looks right."""
    run = tmp_path / "run"
    settings = (*AGAIN, "task.broken=1", "task.flips_from=13")
    refusals = train_outside(pool, 3, "Corrupting", *settings, run=run, layout="ddp")
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "gradients_differ" and step > 2, "from a step between two looks on"
    for told in refusals:
        assert str(told).startswith(f"GuardError: after step {step} rank 1 ("), told
        assert "computes other gradients than another rank for the same samples: 0.weight (and 3 more)" in str(told)
        assert "guard.mute=gradients silences this sentinel" in str(told)
    assert saved(run) == list(range(1, step)), "nothing is saved any more"
    warned = tmp_path / "warned"
    assert train_outside(pool, 3, "Corrupting", *settings, "guard.on_finding=warn", run=warned, layout="ddp") == [
        0,
        0,
        0,
    ]
    assert len(events(warned, "verdict")) == 1 and saved(warned)[-1] == 6


@pytest.mark.distributed
@pytest.mark.full
def test_a_device_that_computes_wrongly_is_named_by_another_copy_of_its_shards(pool: Pools, tmp_path: Path) -> None:
    """Three copies of two ranks each: ranks 2 and 3 sum what they compute, and rank 3 computes wrongly."""
    run = tmp_path / "run"
    settings = (*AGAIN, "task.broken=3", "task.flips_from=13")
    refusals = train_outside(pool, 6, "Corrupting", *settings, run=run, layout="dp_replicate=3,dp_shard=2")
    (verdict,) = events(run, "verdict")
    step = verdict["step"]
    assert verdict["kind"] == "gradients_differ" and step > 2, "from a step between two looks on"
    for told in refusals:
        assert str(told).startswith(f"GuardError: after step {step} rank 2 ("), told
        assert ") or rank 3 (" in str(told) and "rank 1 (" not in str(told).partition("computes")[0]
        assert "computes other gradients than another rank for the same samples: " in str(told)
    assert saved(run) == list(range(1, step)), "nothing is saved any more"


def test_alone_it_finds_what_comes_and_goes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("train.steps=6", "guard.recompute_every=2", "task.flips_from=8", "task.flips_once=true")
    with pytest.raises(Exception, match=r"after step 2 rank 0 \(.*\) computes other gradients a second time: 0.weight"):
        start("Corrupting", run, *settings)
    steady = ("train.steps=6", "guard.recompute_every=2", "task.flips_from=1", "evaluate.every=0")
    assert start("Corrupting", tmp_path / "steady", *steady) == 0, "a device that checks itself agrees with itself"


@pytest.mark.sample(3)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "task"),
    [("ddp", "Curve"), ("fsdp", "Curve"), ("dp_replicate=2,sharding=none", "Curve"), ("ddp", "Normed")],
)
def test_a_run_is_bitwise_what_it_is_without_a_look(pool: Pools, tmp_path: Path, layout: str, task: str) -> None:
    """Dropout, statistics of batches and the average are as they were; one forward is a filler."""
    cut = ["train.global_batch=7", "train.micro_batch=1"] if task == "Curve" else ["train.global_batch=6"]
    settings = (*cut, "train.steps=5", "train.ema=0.9")
    looked, plain = tmp_path / "looked", tmp_path / "plain"
    assert train_outside(pool, 2, task, *settings, run=plain, layout=layout) == [0, 0]
    assert train_outside(pool, 2, task, *settings, "guard.recompute_every=1", run=looked, layout=layout) == [0, 0]
    same_run(looked, plain, 5)
    assert not events(looked, "verdict")
