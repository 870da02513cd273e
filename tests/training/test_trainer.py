"""The loop, and what happens at its boundaries: whole runs, in one process where one is enough."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from allranks.config import resolve_config
from allranks.errors import GuardError
from allranks.observing import heartbeat
from allranks.observing.counters import Stopwatch
from allranks.observing.recorder import StepRecord
from allranks.run import Run
from allranks.training.saver import Saver
from allranks.training.snapshot import Contents, schedule_state
from allranks.training.time_limit import started_at
from allranks.training.trainer import Trainer
from tests.distributed.pool import Pools
from tests.distributed.sessions import session_of
from tests.training.runs import (
    QUICK,
    damage,
    digests,
    events,
    losses,
    manifest,
    same_run,
    saved,
    start,
    train,
    train_outside,
)
from tests.training.tasks import Curve, Streamed

TASKS = {
    "Curve": ("train.steps=9",),
    "OwnOptimizer": ("train.steps=9",),
    "Slowing": ("train.steps=9",),
    "Gan": ("train.steps=9",),
    "Normed": ("train.steps=9", "train.micro_steps=2"),
    "Tied": ("train.steps=9", "train.precision=float64"),
    "Streamed": ("train.steps=9", "task.num_points=38"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("task", TASKS)
def test_interrupted_and_resumed_is_bitwise_the_uninterrupted_run(tmp_path: Path, task: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = (*TASKS[task], "schedule.name=cosine", "schedule.warmup=2", "train.max_norm=0.5")
    assert start(task, whole, *settings) == 0
    assert start(task, parts, *settings, "train.steps=4", "schedule.steps=9") == 0
    assert train(None, "train.steps=7", resume=parts) == 0
    assert train(None, "train.steps=9", resume=parts) == 0
    same_run(whole, parts, 9)
    assert saved(parts) == [7, 9]


@pytest.mark.parametrize("task", ["Curve", "Gan", "Tied"])
def test_an_average_goes_on_bitwise_where_it_stood(tmp_path: Path, task: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert start(task, whole, "train.steps=7", "train.ema=0.7") == 0
    assert start(task, parts, "train.steps=4", "train.ema=0.7") == 0
    assert train(None, "train.steps=7", resume=parts) == 0
    same_run(whole, parts, 7)
    kept = {name: digest for name, digest in digests(parts, 7).items() if name.startswith("ema.")}
    assert kept and kept != {name: digest for name, digest in digests(parts, 4).items() if name in kept}


def verdicts(run: Path) -> list[str]:
    return [event["what"] for event in events(run, "verdict")]


def test_a_step_that_overflows_is_skipped_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, half = tmp_path / "run", "train.precision=float16"
    assert start("Overflowing", run, "train.steps=9", half) == 0
    steps = Run.open(run).steps()
    skipped = [step["step"] for step in steps if "skipped" in step]
    assert len(skipped) == 2 and steps[-1]["skipped_steps"] == 2
    assert [step["loss_scale"] for step in steps] == [
        2.0 ** (16 - sum(s < step["step"] for s in skipped)) for step in steps
    ]
    assert [step["loss"] is None for step in steps] == [step["step"] in skipped for step in steps]
    assert verdicts(run) == [], "what was skipped has left nothing"
    out, err = capsys.readouterr()
    assert "2 skipped" in out + err


def test_a_scale_that_falls_too_far_is_told_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(GuardError, match=r"26 steps in a row.*take train.precision=bfloat16"):
        start("Overflowing", run, "train.steps=60", "train.precision=float16", "task.last=99")
    told, ended = verdicts(run)
    assert told.startswith("the scale of the loss has fallen to 0.5 at step ")
    assert "guard.nonfinite_limit=10" in ended


def test_a_scale_goes_on_bitwise_where_it_stood(tmp_path: Path) -> None:
    whole, parts, half = tmp_path / "whole", tmp_path / "parts", "train.precision=float16"
    assert start("Remembering", whole, "train.steps=7", half) == 0
    assert start("Remembering", parts, "train.steps=4", half) == 0
    assert train(None, "train.steps=7", resume=parts) == 0
    same_run(whole, parts, 7)
    assert {"scaler.scale", "scaler.good_steps", "scaler.skipped_steps"} <= digests(parts, 7).keys()


def test_the_scale_of_a_step_of_ones_own_goes_on_bitwise_where_it_stood(tmp_path: Path) -> None:
    whole, parts, half = tmp_path / "whole", tmp_path / "parts", "train.precision=float16"
    assert start("Gan", whole, "train.steps=5", half) == 0
    assert start("Gan", parts, "train.steps=3", half) == 0
    assert train(None, "train.steps=5", resume=parts) == 0
    same_run(whole, parts, 5)
    assert {"scaler.scale", "scaler.good_steps", "scaler.skipped_steps"} <= digests(parts, 5).keys()
    assert [line["loss_scale"] for line in events(whole, "step")] == [
        line["loss_scale"] for line in events(parts, "step")
    ]


def test_a_finished_run_resumed_does_nothing_twice(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=5") == 0
    before = losses(run), digests(run, 5)
    assert train(None, resume=run) == 0
    assert train(None, "train.steps=3", resume=run) == 0
    assert saved(run) == [5] and (losses(run), digests(run, 5)) == before
    assert [event["step"] for event in events(run, "checkpoint")] == [5]
    assert [event["step"] for event in events(run, "evaluation")] == [5, 5, 5]


def test_checkpoints_come_at_their_interval_and_at_the_end_and_the_newest_stay(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=8", "checkpoint.every=3", "checkpoint.keep=2") == 0
    assert [event["step"] for event in events(run, "checkpoint")] == [3, 6, 8]
    assert saved(run) == [6, 8]
    assert start("Curve", tmp_path / "even", "train.steps=6", "checkpoint.every=3") == 0
    assert [event["step"] for event in events(tmp_path / "even", "checkpoint")] == [3, 6]


def test_every_step_stands_in_the_journal_before_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume will not do it again."""
    run, seen = tmp_path / "run", list[int]()
    real = Saver.save

    def save(saver: Saver, step: int, before_commit: Callable[[], None]) -> Path:
        def look() -> None:
            before_commit()
            seen.append(Run.open(run).last_step)

        return real(saver, step, look)

    monkeypatch.setattr(Saver, "save", save)
    assert start("Curve", run, "train.steps=4", "checkpoint.every=1") == 0
    assert seen == [1, 2, 3, 4]


def test_evaluation_comes_at_its_interval_and_at_the_end_once(tmp_path: Path) -> None:
    for every, wanted in (("3", [3, 6, 8]), ("4", [4, 8]), ("none", [8]), ("0", [])):
        run = tmp_path / every
        assert start("Curve", run, "train.steps=8", f"evaluate.every={every}") == 0
        assert [event["step"] for event in events(run, "evaluation")] == wanted
    metrics = events(tmp_path / "none", "evaluation")[0]["metrics"]
    assert set(metrics) == {"loss", "accuracy"} and 0 < metrics["accuracy"] <= 1


@pytest.mark.parametrize("task", ["Curve", "Normed"])
def test_evaluation_does_not_change_training(tmp_path: Path, task: str) -> None:
    settings = ("train.steps=9", "train.micro_steps=2")
    assert start(task, tmp_path / "often", *settings, "evaluate.every=2") == 0
    assert start(task, tmp_path / "never", *settings, "evaluate.every=0") == 0
    same_run(tmp_path / "often", tmp_path / "never", 9)


def test_metrics_that_fail_lose_no_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="mistake in metrics"):
        start("Curve", run, "train.steps=6", "task.boom=metrics")
    assert saved(run) == [6] and events(run, "end")[-1]["reason"] == "failed"


@pytest.mark.parametrize(("name", "code", "also"), [("SIGINT", 130, "interrupted"), ("SIGUSR1", 75, "terminated")])
def test_a_stop_acts_at_the_next_boundary_after_a_save(tmp_path: Path, name: str, code: int, also: str) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = ("train.steps=9", "task.signal_after=6", f"task.signal_name={name}")
    assert start("Curve", run, *settings) == code, also
    stopped = max(losses(run))
    assert 1 <= stopped < 9
    assert saved(run) == [stopped] and not events(run, "evaluation")
    assert events(run, "end")[-1]["reason"] == "stopped"
    assert train(None, "task.signal_after=-1", resume=run, change=["task.signal_after"]) == 0
    assert start("Curve", whole, "train.steps=9") == 0
    same_run(whole, run, 9)


def test_the_end_of_its_time_is_a_stop_that_is_told(tmp_path: Path) -> None:
    """Which a resume may move."""
    for allowed in (4.0, 60.0):  # on a slow machine four seconds may be over before anything was saved
        run = tmp_path / f"{allowed}"
        seconds = time.monotonic() - started_at() + allowed  # of this process, which no command started
        assert start("Curve", run, "train.steps=1000000", "checkpoint.every=50", f"train.max_seconds={seconds}") == 75
        if len(saved(run)) > 1:
            break
    stopped = max(losses(run))
    assert saved(run)[-1] == stopped and events(run, "end")[-1]["reason"] == "stopped"
    (told,) = (event for event in events(run, "decision") if "train.max_seconds" in event["because"])
    assert told["step"] == stopped and "a step took up to" in told["because"] and "the last save" in told["because"]
    over = heartbeat.current()._fields[heartbeat.TIME_OVER]
    assert 0 < over <= time.monotonic_ns(), "what its agent reads"
    time.sleep(max(0.0, seconds - (time.monotonic() - started_at())))  # it has stopped in time to save, so before
    assert train(None, f"train.steps={stopped + 2}", resume=run) == 75 and max(losses(run)) == stopped
    assert train(None, f"train.steps={stopped + 2}", "train.max_seconds=none", resume=run) == 0
    assert saved(run)[-1] == stopped + 2


def test_a_stop_before_the_first_step_can_be_resumed(tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert start("Curve", run, "train.steps=4", "task.signal_after=5") == 130
    assert saved(run) == [0] and not losses(run)
    assert train(None, "task.signal_after=-1", resume=run, change=["task.signal_after"]) == 0
    assert start("Curve", whole, "train.steps=4") == 0
    same_run(whole, run, 4)


def test_a_run_goes_on_where_it_was_moved_to(tmp_path: Path) -> None:
    run, whole, moved = tmp_path / "run", tmp_path / "whole", tmp_path / "elsewhere" / "moved"
    assert start("Curve", run, "train.steps=4", "schedule.steps=8") == 0
    moved.parent.mkdir()
    run.rename(moved)
    assert train(None, "train.steps=8", resume=moved) == 0 and not run.exists()
    assert start("Curve", whole, "train.steps=8") == 0
    same_run(whole, moved, 8)


def test_the_schedule_of_the_first_start_stays(tmp_path: Path) -> None:
    """Also where the end of the data, not train.steps, was its end: 50 samples are 5 steps."""
    for length, more in (("train.epochs=1", "train.epochs=2"), ("train.steps=5", "train.steps=10")):
        run = tmp_path / more
        settings = (length, "task.num_points=50", "schedule.name=linear", "schedule.floor=0.25")
        assert start("Curve", run, *settings) == 0
        first = manifest(run, 5)["state"]["schedule"]
        assert train(None, more, resume=run) == 0
        assert manifest(run, 10)["state"]["schedule"] == first
        rates = [event["lr"] for event in events(run, "step")]
        assert rates[5:] == [0.25 * 0.05] * 5 and rates[4] > rates[5]


def test_a_schedule_that_is_changed_is_another_one_from_then_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4", "schedule.name=linear") == 0
    assert train(None, "train.steps=6", "schedule.name=constant", resume=run, change=["schedule.name"]) == 0
    assert train(None, "train.steps=8", resume=run) == 0
    assert train(None, "train.steps=9", "optimizer.lr=0.01", resume=run, change=["optimizer.lr"]) == 0
    assert [event["lr"] for event in events(run, "step")][4:] == [0.05] * 4 + [0.01]


def test_steps_count_on_where_a_resume_changes_the_global_batch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Curve", run, "train.steps=4", "checkpoint.keep=9") == 0
    assert train(None, "train.steps=6", "train.global_batch=20", resume=run, change=["train.global_batch"]) == 0
    assert train(None, "train.steps=9", "train.global_batch=5", resume=run, change=["train.global_batch"]) == 0
    steps = [(event["step"], event["samples"]) for event in Run.open(run).steps()]
    assert steps == [(1, 10), (2, 20), (3, 30), (4, 40), (5, 60), (6, 80), (7, 85), (8, 90), (9, 95)]
    assert saved(run) == [4, 6, 9]


def test_an_optimizer_of_the_tasks_own_is_taken_and_scheduled(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("OwnOptimizer", run, "train.steps=4", "schedule.name=linear") == 0
    assert [event["lr"] for event in events(run, "step")] == pytest.approx([0.1, 0.075, 0.05, 0.025])
    assert sorted(name for name in digests(run, 4) if name.startswith("optimizer.")) == [
        "optimizer.momentum_buffer.0.weight"
    ]


def test_a_gan_keeps_every_state_by_its_models_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert start("Gan", run, "train.steps=3") == 0
    names = set(digests(run, 3))
    assert {"model.maker.0.weight", "optimizer.maker.exp_avg.maker.0.weight"} <= names
    assert "optimizer.critic.momentum_buffer.critic.weight" in names
    assert not events(run, "evaluation") and all(event["loss"] > 0 for event in events(run, "step"))


def test_bfloat16_trains_in_float32_parameters(tmp_path: Path) -> None:
    low, full = tmp_path / "low", tmp_path / "full"
    assert start("Curve", low, "train.steps=4", "train.precision=bfloat16") == 0
    assert start("Curve", full, "train.steps=4") == 0
    assert {record["dtype"] for record in manifest(low, 4)["tensors"].values()} == {"float32"}
    assert losses(low) != losses(full)
    assert losses(low)[4][0] == pytest.approx(losses(full)[4][0], rel=0.02)


@pytest.mark.parametrize("task", ["Curve", "Streamed"])
def test_deterministic_kernels_and_a_loading_process_change_nothing(tmp_path: Path, task: str) -> None:
    settings = ("train.steps=9", "task.num_points=38")
    assert start(task, tmp_path / "plain", *settings) == 0
    assert start(task, tmp_path / "other", *settings, "train.deterministic=true", "data.workers=1") == 0
    same_run(tmp_path / "plain", tmp_path / "other", 9)


def test_an_iterable_is_read_to_the_end_of_its_last_epoch(tmp_path: Path) -> None:
    run, parts = tmp_path / "run", tmp_path / "parts"
    assert start("Streamed", run, "task.num_points=23", "train.epochs=2") == 0
    assert [event["samples"] for event in events(run, "step")] == [10, 20, 30, 40, 46]
    assert start("Streamed", parts, "task.num_points=23", "train.steps=3") == 0
    assert train(None, "train.epochs=2", resume=parts) == 0
    same_run(run, parts, 5)


def test_a_newer_damaged_checkpoint_is_passed_over_and_replaced(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = ("train.steps=6", "checkpoint.every=2", "checkpoint.keep=9")
    assert start("Curve", whole, *settings) == 0
    assert start("Curve", run, *settings) == 0
    damage(run, 6)
    assert train(None, resume=run) == 0
    assert events(run, "resume")[-1]["step"] == 4
    same_run(whole, run, 6)


@pytest.mark.distributed
def test_data_that_shards_itself_ends_on_all_ranks_at_once(pool: Pools, tmp_path: Path) -> None:
    """Rank 0 has 11 samples, rank 1 has 20: with 5 a step on each, rank 0 runs fillers in the fourth."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = (*QUICK, "task.order=sharded", "task.num_points=40", "train.max_norm=1")
    assert train_outside(pool, 2, "Streamed", *settings, run=whole) == [0, 0]
    assert list(losses(whole)) == [1, 2, 3, 4] and saved(whole) == [4]
    said = [event["what"] for event in events(whole, "decision")]
    assert "every sample is covered, but in no fixed order" in said
    assert train_outside(pool, 2, "Streamed", *settings, "train.steps=2", run=parts) == [0, 0]
    assert train_outside(pool, 2, None, "train.epochs=1", resume=parts) == [0, 0]
    same_run(whole, parts, 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_no_step_is_made_of_nobodys_samples(tmp_path: Path, lag: int) -> None:
    """Not even where stops are read a step late, as on CUDA: momentum would move the parameters once more."""
    config = resolve_config(
        task_defaults={"optimizer.name": "sgd", "optimizer.momentum": 0.9, "train.global_batch": 5, "train.epochs": 1},
        toml=None,
        overrides=(),
    )
    session = session_of(Streamed(order="sharded", num_points=13), config)
    kept = schedule_state(session.schedule, config.schedule)
    contents = Contents(session.spread, session.optimizers, session.stream, extra=kept)
    saver = Saver(contents, session.processes, config.checkpoint, tmp_path, "run", 1)
    trainer = Trainer(session, saver, Stopwatch(), None, None)
    trainer._lag = lag
    assert trainer.train().step == 3
    assert session.stream.position == 15


class Kept:
    """What a Trainer gives its recorder."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def record(self, record: StepRecord) -> None:
        self.seconds.append(record.seconds)

    def write(self, *_: object, **__: object) -> None: ...

    def flush(self) -> None: ...


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_takes_as_long_as_the_device_does_also_where_the_host_runs_ahead(tmp_path: Path, lag: int) -> None:
    """The host waits for the step before, as on CUDA, before it begins the next one: that is a step's time there."""
    config = resolve_config(
        task_defaults={"optimizer.name": "sgd", "train.global_batch": 5, "train.steps": 4}, toml=None, overrides=()
    )
    session = session_of(Curve(), config)
    contents = Contents(
        session.spread, session.optimizers, session.stream, extra=schedule_state(session.schedule, config.schedule)
    )
    saver = Saver(contents, session.processes, config.checkpoint, tmp_path, "run", 1)
    kept = Kept()
    trainer = Trainer(session, saver, Stopwatch(), cast("Any", kept), None)
    trainer._lag = lag
    read = trainer._read

    def wait(*given: Any) -> Any:
        time.sleep(0.2)
        return read(*given)

    trainer._read = wait  # type: ignore[method-assign, assignment]
    assert trainer.train().step == 4
    assert len(kept.seconds) == 4 and all((seconds > 0.2) == bool(lag) for seconds in kept.seconds)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("fsdp", "in step 1 the ranks ran different modules: rank 0 blocks.0, rank 1 blocks.1."),
        (
            "fsdp,sharding=none",  # copies compare what they reduce, before they do
            "the ranks ran different modules: rank 0 the gradients of blocks.0, rank 1 the gradients of blocks.1.",
        ),
    ],
)
def test_ranks_that_run_different_blocks_are_stopped_before_anything_is_saved(
    pool: Pools, tmp_path: Path, layout: str, words: str
) -> None:
    run = tmp_path / "run"
    overrides = ("train.steps=1", "checkpoint.every=1", f"layout={layout}")
    refusals = train_outside(pool, 2, "Forked", *overrides, run=run)
    for refusal in refusals:
        assert str(refusal).startswith(f"TaskError: {words} A sharded layout")
    assert saved(run) == []
