"""Runs of the real command: what it is given, what is said when it fails, and nothing that is left."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.benchmarking import training_runs
from allranks.benchmarking.scaling import Point, Trained, plan_points
from allranks.benchmarking.training_runs import Command, ask_config, await_end, measure_all, train_once
from allranks.config_sections import TrainConfig
from allranks.errors import ConfigError, ProcessError
from allranks.layout import Layout
from tests.commands import POINTS, PROGRAMS
from tests.processes import is_gone, wait_until

ONE = Point("strong", "ddp", Layout(kind="single"), 8)


def test_the_command_is_what_a_user_types() -> None:
    point = Point("weak", "fsdp", Layout(dp_shard=2, recompute="full"), 16)
    line = Command(("task.py", "optimizer.lr=0.1"), 20, "cpu", 1).line(point, Path("/tmp/run"))
    assert " ".join(line) == (
        "train task.py optimizer.lr=0.1 train.steps=20 train.global_batch=16 --layout dp_shard=2,recompute=full "
        "--nproc 2 --device cpu --run /tmp/run --json"
    )


@pytest.mark.full
@pytest.mark.distributed
def test_the_config_is_the_tasks() -> None:
    assert ask_config((POINTS, "train.global_batch=24", "train.max_norm=2.5"), "cpu") == TrainConfig(
        global_batch=24, max_norm=2.5
    )
    with pytest.raises(ConfigError, match=r"^no config key 'train\.speed'|train\.speed"):
        ask_config((POINTS, "train.speed=3"), "cpu")


@pytest.mark.full
@pytest.mark.distributed
def test_a_task_that_fails_is_its_last_line_and_its_code() -> None:
    command = Command((POINTS, "task.boom_rank=0"), 30, "cpu", 1)
    told = r"^single on 1 process, 8 samples a step: exit code 1: .*ValueError: the user's own mistake$"
    with pytest.raises(ProcessError, match=told):
        train_once(ONE, command)
    with pytest.raises(ConfigError, match=r"exit code 2: .*nosuch"):
        train_once(ONE, Command((POINTS, "optimizer.name=nosuch"), 30, "cpu", 1))


def test_runs_take_turns_and_each_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []

    def train(point: Point, command: Command) -> Trained:
        made.append(point.run)
        return Trained(float(len(made)), 0, 0.0, {}, ())

    monkeypatch.setattr(training_runs, "train_once", train)
    points = plan_points(["ddp"], [1, 2], ("strong", "weak"), TrainConfig(global_batch=8, steps=10))
    told: list[tuple[int, str]] = []
    found = measure_all(
        points, Command((), 10, "cpu", 1), 2, tell=lambda repeat, point, _: told.append((repeat, point.mode))
    )
    forth = [("single", 8), ("dp_replicate=2", 8), ("dp_replicate=2", 16)]
    assert made == forth + forth[::-1]
    assert [repeat for repeat, _ in told] == [0, 0, 0, 1, 1, 1]
    assert [{run: trained.step_seconds for run, trained in repeat.items()} for repeat in found] == [
        dict(zip(forth, (1.0, 2.0, 3.0), strict=True)),
        dict(zip(forth, (6.0, 5.0, 4.0), strict=True)),
    ]


@pytest.mark.parametrize(("threads", "expected"), [(3, "3"), (None, "7")])
def test_every_process_gets_its_threads(threads: int | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    popen = subprocess.Popen

    def start(arguments: list[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
        given.append(env["OMP_NUM_THREADS"])
        program = "import sys; print('one\\nallranks: error: no such thing', file=sys.stderr); sys.exit(2)"
        return popen([sys.executable, "-c", program], env=env, **how)

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ConfigError, match=r"exit code 2: no such thing$"):
        train_once(ONE, Command((), 10, "cpu", threads))
    assert given == [expected]


class Silent:
    """A process that writes a step each time somebody waits for it, until it hangs or ends."""

    def __init__(self, journal: Path, clock: list[float], end: float | None) -> None:
        self._file, self._clock, self._end = journal / "rank-00001.jsonl", clock, end

    def communicate(self, timeout: float) -> tuple[str, str]:
        self._clock[0] += timeout
        if self._end is not None and self._clock[0] >= self._end:
            return "out", "err"
        if self._clock[0] < 20:
            with self._file.open("a") as file:
                file.write("{}\n")
        raise subprocess.TimeoutExpired("allranks", timeout)


@pytest.mark.parametrize(("end", "seconds"), [(24.0, 24.0), (None, 25.0)])
def test_a_run_that_writes_no_line_any_more_hangs(
    end: float | None, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes for 19 seconds, far longer than the limit; then it may be silent for 5."""
    clock = [0.0]
    monkeypatch.setattr(f"{training_runs.__name__}.time.monotonic", lambda: clock[0])
    process: Any = Silent(tmp_path, clock, end)
    with nullcontext() if end else pytest.raises(TimeoutError):
        assert await_end(process, tmp_path, 5.0) == ("out", "err")
    assert clock[0] == seconds


def test_a_run_that_hangs_is_killed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, list[subprocess.Popen[str]]()

    def start(arguments: list[str], **how: Any) -> subprocess.Popen[str]:
        started.append(popen([sys.executable, "-c", "import time; time.sleep(3600)"], **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(training_runs, "LOOK_SECONDS", 0.01)
    told = r"^single on 1 process, 8 samples a step: no line in its journal for 100\.0 ms: taken to hang, and killed; a"
    with pytest.raises(ProcessError, match=told):
        train_once(ONE, Command((), 10, "cpu", 1, limit_seconds=0.1))
    assert started[0].returncode == -signal.SIGKILL


PROGRAM = f"""
from allranks.benchmarking.training_runs import Command, train_once
from tests.benchmarking.test_training_runs import ONE
train_once(ONE, Command(({POINTS!r}, "task.pause=1.0"), 600, "cpu", 1))
"""


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's promise")
def test_a_killed_benchmark_leaves_no_training_behind(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, cwd=PROGRAMS.parents[1])
    try:
        wait_until(lambda: any(tmp_path.glob("allranks-scaling-*/run/journal/*.jsonl")))
        below = [child.pid for child in psutil.Process(bench.pid).children(recursive=True)]
        assert below
    finally:
        os.kill(bench.pid, signal.SIGKILL)
        bench.wait()
    wait_until(lambda: all(map(is_gone, below)))
