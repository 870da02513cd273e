"""Which runs are planned, what is read from their journals, and what a row says."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from allranks.benchmarking.scaling import (
    Point,
    Trained,
    decide_threads,
    default_nproc,
    plan_points,
    read_trained,
    summarise,
)
from allranks.config import resolve_config
from allranks.config_sections import TrainConfig
from allranks.errors import ConfigError, LayoutError, ProcessError
from allranks.layout import Layout
from allranks.observing.journal import Journal
from allranks.run import Run

TRAIN = TrainConfig(global_batch=8, steps=10)


def planned(strategies: list[str], nproc: list[int], mode: Any = "strong", **train: int) -> list[tuple[str, int, int]]:
    points = plan_points(strategies, nproc, (mode,), TRAIN.model_copy(update=train))
    return [(str(point.layout), point.layout.world_size, point.global_batch) for point in points]


def trained(seconds: float, loss: float = 2.0, ledger: str = "a", memory: int = 100) -> Trained:
    return Trained(seconds, memory, loss, {"loss": loss}, (ledger,))


def test_one_process_stands_once_and_first() -> None:
    expected = [("single", 1), ("dp_replicate=2", 2), ("dp_shard=2", 2), ("dp_replicate=4", 4), ("dp_shard=4", 4)]
    assert [entry[:2] for entry in planned(["ddp", "fsdp"], [4, 1, 2])] == expected


def test_the_batch_stays_or_grows() -> None:
    assert [batch for *_, batch in planned(["ddp"], [1, 2, 4])] == [8, 8, 8]
    assert [batch for *_, batch in planned(["ddp"], [1, 2, 4], "weak")] == [8, 16, 32]
    assert planned(["ddp", "tp=2"], [1], "weak")[-1] == ("tp=2", 2, 16)  # also where both see the same samples


def test_keys_behind_a_layout_make_another_run() -> None:
    hooked = "ddp layout.ddp_hook=bfloat16"
    points = plan_points(["ddp", hooked], [1, 2], ("strong",), TRAIN)
    assert [point.run for point in points] == [
        ("single", 8),
        ("dp_replicate=2", 8),
        ("dp_replicate=2 layout.ddp_hook=bfloat16", 8),
    ]
    assert points[-1].keys == ("layout.ddp_hook=bfloat16",) and points[0].keys == ()
    assert str(points[-1]) == "dp_replicate=2 layout.ddp_hook=bfloat16 on 2 processes, 8 samples a step"
    with pytest.raises(ConfigError, match="expected keys of the layout"):
        plan_points(["ddp train.seed=1"], [1, 2], ("strong",), TRAIN)


def test_a_strategy_without_a_star_takes_its_own_number() -> None:
    assert planned(["ddp", "tp=2,dp_shard=2"], [1, 2])[-1] == ("dp_shard=2,tp=2", 4, 8)
    assert ("dp_shard=2,tp=2", 4, 8) in planned(["tp=2,dp_shard=*"], [1, 4, 2]) + planned(["tp=2,dp_shard=*"], [2, 4])


@pytest.mark.parametrize(
    ("strategies", "nproc", "train", "error", "told"),
    [
        (["ddp"], [1], {}, ConfigError, "nothing to be compared with"),
        (["tp=2,dp_shard=*"], [1, 3], {}, LayoutError, "the world has 1 process"),
        (["ddp"], [1, 16], {}, LayoutError, r"train.global_batch\(8\) < dp_replicate"),
        (["ddp,offload=parameters", "ddp"], [1, 2], {}, LayoutError, "offload=parameters keeps the shards"),
        (["ddp"], [1, 2], {"micro_batch": 2, "micro_steps": 2}, ConfigError, "both say how a step is cut"),
        (["pp=2", "ddp"], [1, 2], {"global_batch": 1}, LayoutError, "micro-steps"),
    ],
)
def test_what_cannot_be_run_is_refused(
    strategies: list[str], nproc: list[int], train: dict[str, int], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        planned(strategies, nproc, **train)


def test_processes_by_default_are_powers_of_two() -> None:
    assert [default_nproc(devices) for devices in (1, 2, 6, 8)] == [(1, 2), (1, 2), (1, 2, 4), (1, 2, 4, 8)]


def test_a_run_is_read_from_its_journals(tmp_path: Path) -> None:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=12"])
    run = Run.create(tmp_path, "task", config, {}, directory=tmp_path / "run")
    journals = [Journal(run.journal(rank), rank) for rank in (0, 1)]
    at = 0.0
    for step in range(1, 13):
        at += 9.0 if step <= 6 or step == 9 else 0.5  # slow until it is warm, and once by accident
        line = {"step": step, "samples": 4 * step, "loss": float(step), "ledger": f"{step:x}", "seconds": 0.1}
        journals[0].append([{"t": at, "event": "step", **line}])
    journals[0].write("evaluation", step=12, samples=48, metrics={"loss": 1.5}, seconds=1.0)
    for rank, journal in enumerate(journals):
        journal.write("end", reason="done", seconds={}, memory_bytes=100 + rank, error=None)
        journal.close()
    found = read_trained(run)
    assert (found.step_seconds, found.memory_bytes, found.loss) == (0.5, 101, 11.0)  # of steps 10, 11, 12
    assert found.validation == {"loss": 1.5}
    assert (len(found.ledger), found.ledger[0], found.ledger[-1]) == (12, "4 1", "48 c")


def test_a_run_whose_data_ends_is_no_measurement(tmp_path: Path) -> None:
    config = resolve_config(task_defaults={}, toml=None, overrides=["train.steps=12"])
    run = Run.create(tmp_path, "task", config, {}, directory=tmp_path / "run")
    with pytest.raises(ProcessError, match="after 0 steps"):
        read_trained(run)


def test_a_row_is_ratios_within_each_repeat() -> None:
    points = plan_points(["ddp"], [1, 2], ("strong", "weak"), TRAIN)
    one, two = points[0].run, points[1].run
    wide = points[3].run
    assert points[2].run == one  # the same run, measured once
    repeats = [
        {one: trained(1.0), two: trained(0.5, memory=70), wide: trained(1.0, 1.0, "b")},
        {one: trained(10.0), two: trained(8.0, 2.2, "a", 70), wide: trained(16.0, 1.0, "b")},  # the machine was busy
        {one: trained(2.0), two: trained(1.25, 2.2, "a", 90), wide: trained(2.5, 1.0, "b")},
    ]
    base, shared, again, grown = summarise(points, repeats)
    assert (base.speedup, base.efficiency, base.time_saved, base.loss_difference) == (1.0, 1.0, 0.0, 0.0)
    assert (shared.speedup, shared.efficiency, shared.time_saved) == (1.6, 0.8, 0.375)
    assert (shared.speedup_q1, shared.speedup_q3) == (1.25, 2.0)
    assert (shared.step_ms, shared.samples_per_second, shared.memory_bytes) == (1250.0, 6.4, 90)
    assert shared.loss_difference == pytest.approx(0.1)
    assert shared.same_samples
    assert (again.mode, again.step_ms) == ("weak", base.step_ms)
    assert (grown.speedup, grown.efficiency, grown.same_samples, grown.global_batch) == (1.6, 0.8, False, 16)


def test_two_processes_may_be_the_fewest() -> None:
    points = [Point("strong", "ddp", Layout(dp_replicate=size), 8) for size in (2, 4)]
    (_, row) = summarise(points, [{points[0].run: trained(1.0), points[1].run: trained(0.5)}])
    assert (row.speedup, row.efficiency, row.speedup_q1) == (2.0, 1.0, 2.0)


def test_a_loss_that_is_no_number_is_spelled() -> None:
    points = plan_points(["ddp"], [1, 2], ("strong",), TRAIN)
    rows = summarise(points, [{point.run: trained(1.0, math.nan) for point in points}])
    document = json.loads(json.dumps(rows[1].to_json(), allow_nan=False))
    assert (document["loss"], document["validation"], document["speedup"]) == ("nan", {"loss": "nan"}, 1.0)


def test_threads_are_the_same_in_all_runs() -> None:
    threads, decisions = decide_threads(2, 8, "", gpu=False)
    assert threads == 4
    assert [str(decision) for decision in decisions] == [
        "4 threads in each process, because 2 processes share 8 core(s); in runs of fewer processes too: "
        "a process stands for a device"
    ]
    threads, decisions = decide_threads(4, 2, "", gpu=False)
    assert threads == 1
    assert decisions[1].because == "4 processes of 1 thread share 2 cores"
    assert "how well cores are shared" in decisions[1].what
    threads, decisions = decide_threads(2, 8, "8", gpu=False)
    assert (threads, len(decisions)) == (8, 2)
    assert decisions[0].because.startswith("OMP_NUM_THREADS says so")
    assert decide_threads(8, 2, "", gpu=True) == (None, [])
