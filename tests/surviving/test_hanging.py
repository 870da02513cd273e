"""Faults of the real command with real training: told in words, and the run goes on to its last step."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allranks.reporting.explain import explain
from allranks.run import Run
from allranks.surviving.invariants import same_samples, same_state
from allranks.surviving.monitor import LEAST_HANG_SECONDS
from tests.commands import (
    LIMIT_SECONDS,
    PROGRAMS,
    alive,
    allranks,
    restart_seconds,
    running,
    steps,
    tensor_digests,
    wait_for,
    worker_pids,
)

FAULTY = str(PROGRAMS / "faulty.py")
QUICK = ("train.steps=30", "train.global_batch=8", "checkpoint.every=5", "guard.hang_seconds=3", "--nproc", "2")
PATIENCE = ("guard.stopped_seconds=2", "guard.input_seconds=4", "guard.checkpoint_seconds=4")
LIMITS = (*PATIENCE, "--layout", "ddp", "--run", "run")

Record = Callable[[str, object], None]
pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("divergence", ["divergence", "restart"]),
        pytest.param("straggler", ["straggler", "restart"], marks=pytest.mark.full),
        pytest.param("SIGSTOP", ["stopped", "restart"], marks=pytest.mark.full),
        pytest.param("SIGKILL", ["restart"], marks=pytest.mark.full),
        pytest.param("data", ["data", "restart"], marks=pytest.mark.full),
        pytest.param("lock", ["straggler", "restart"], marks=pytest.mark.full),
        pytest.param("disk", ["disk", "restart"], marks=pytest.mark.full),
    ],
)
def test_a_fault_of_a_real_run(tmp_path: Path, record_property: Record, fault: str, kinds: list[str]) -> None:
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, f"task.fault={fault}", folder=tmp_path)
    run = tmp_path / "run"
    told = [event for event in Run.open(run).events() if event["event"] == "verdict"]
    assert list(dict.fromkeys(event["kind"] for event in told)) == kinds, ran.stderr
    assert list(steps(run)) == list(range(1, 31))
    assert Run.open(run).attempts == 2
    record_property("restart_seconds", restart_seconds(run))
    assert "rank 1" in told[0]["what"] and told[0]["what"] in ran.stderr
    if fault not in ("SIGKILL", "SIGSTOP"):
        assert any("faulty.py" in line for line in told[0]["evidence"]), told[0]
    if fault == "divergence":
        assert "broadcast number" in told[0]["what"] and "all_reduce number" in told[0]["what"]
    if kinds[0] != "restart":
        assert explain(run)[0].kind == kinds[0]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["divergence", "straggler"])
def test_with_the_limit_that_is_learned_a_hang_is_told_within_half_a_minute(
    tmp_path: Path, record_property: Record, fault: str
) -> None:
    words = [word for word in QUICK if not word.startswith("guard.hang_seconds")]
    allranks("train", FAULTY, *words, *LIMITS, f"task.fault={fault}", folder=tmp_path)
    told = Run.open(tmp_path / "run").events()
    (place,) = [place for place, event in enumerate(told) if event["event"] == "verdict" and event["kind"] == fault]
    last = next(event for event in reversed(told[:place]) if event["event"] == "step")
    seconds = told[place]["t"] - last["t"]
    record_property("verdict_seconds", seconds)
    assert seconds + 0.1 >= LEAST_HANG_SECONDS and seconds < 30
    assert any("faulty.py" in line for line in told[place]["evidence"])


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")
def test_a_peer_that_has_gone_and_whose_connections_stay_open_is_named(tmp_path: Path) -> None:
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, "task.fault=dead", folder=tmp_path)
    told = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told][:2] == ["dead_peer", "restart"], ran.stderr
    assert "rank 1 is not there any more, and waited for" in told[0]["what"]
    assert any("waits in all_reduce number" in line for line in told[0]["evidence"]), told[0]
    assert list(steps(tmp_path / "run")) == list(range(1, 31)) and Run.open(tmp_path / "run").attempts == 2


@pytest.mark.full
def test_ranks_that_never_meet_are_told_before_five_steps_have_passed(tmp_path: Path) -> None:
    words = ("train.steps=6", "train.global_batch=8", "--nproc", "2", "--layout", "ddp", "--run", "run")
    fault = ("task.fault=divergence", "task.pause=8", "task.at=6", "guard.slow_rank=off")
    allranks("train", FAULTY, *words, *fault, folder=tmp_path)
    told = Run.open(tmp_path / "run").events()
    (place,) = [place for place, event in enumerate(told) if event["event"] == "verdict" and event["kind"] != "restart"]
    assert told[place]["kind"] == "divergence"
    made = [event for event in told[:place] if event["event"] == "step"]
    assert told[place]["t"] - made[-1]["t"] < 5 * max(event["seconds"] for event in made[1:])


@pytest.mark.full
def test_a_save_that_takes_long_is_told_of_and_costs_nothing(tmp_path: Path) -> None:
    words = [*QUICK, "--layout", "ddp", "--run", "run", "task.fault=slow disk", "guard.slow_rank=off"]
    allranks("train", FAULTY, *words, folder=tmp_path)
    run = Run.open(tmp_path / "run")
    told = [event for event in run.events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told] == ["disk", "goes_on"] and run.attempts == 1, told
    assert "rank 1 is waiting for a disk at " in told[0]["what"] and "faulty.py:" in told[0]["what"]
    assert "in state_dict, and the others wait for it; it may take 1800 s" in told[0]["what"]
    assert list(steps(tmp_path / "run")) == list(range(1, 31))


@pytest.mark.full
def test_a_crash_in_compiled_code_has_its_name_and_its_stack_in_the_log(tmp_path: Path) -> None:
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, "task.fault=SIGABRT", folder=tmp_path)
    assert "rank 1 on" in ran.stderr and "was killed by SIGABRT: a crash in compiled code" in ran.stderr
    log = Run.open(tmp_path / "run").log(1).read_text()
    assert "Fatal Python error: Aborted" in log and "in meet" in log and "faulty.py" in log


@pytest.mark.full
def test_a_process_that_loads_data_is_killed_and_all_start_again(tmp_path: Path, record_property: Record) -> None:
    """The kernel ends such a process first where memory runs out: it is named, and no sample is lost or fed twice."""
    loading = (FAULTY, *QUICK, "data.workers=1", "--layout", "ddp")
    for name, fault in (("run", "loader"), ("whole", "none")):
        ran = allranks("train", *loading, "--run", name, f"task.fault={fault}", folder=tmp_path)
        if fault == "loader":
            assert "a process that loads data died" in ran.stderr, ran.stderr
    broken, whole = Run.open(tmp_path / "run"), Run.open(tmp_path / "whole")
    (told,) = (event for event in broken.events() if event["event"] == "verdict")
    assert told["kind"] == "restart" and "rank 1 on " in told["what"] and "a process that loads data" in told["what"]
    assert (broken.attempts, whole.attempts) == (2, 1) and list(steps(broken.path)) == list(range(1, 31))
    assert same_samples(whole, broken).holds and same_state(whole, broken).holds
    record_property("restart_seconds", restart_seconds(broken.path))


CLOCK = """
import os, time
real = time.time
time.time = lambda: real() + {seconds} * os.path.exists({flag!r})
"""
"""A sitecustomize.py: in every process of the command the clock is another one as soon as a file is there."""


@pytest.mark.full
@pytest.mark.parametrize("seconds", [-3600.0, 3600.0], ids=["back", "forward"])
def test_a_clock_that_is_set_in_a_run_is_no_hang_and_lengthens_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    flag = str(tmp_path / "set")
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(seconds=seconds, flag=flag))
    monkeypatch.setenv("CLOCK_IS_SET", flag)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, "task.fault=clock", folder=tmp_path)
    run = Run.open(tmp_path / "run")
    (told,) = (event for event in run.events() if event["event"] == "verdict")
    assert told["kind"] == "restart" and "rank 1 on " in told["what"], ran.stderr
    assert list(steps(run.path)) == list(range(1, 31)) and run.attempts == 2
    first, last = (float(event["t"]) for event in (run.events()[0], run.events()[-1]))
    assert (last - first) * seconds > 0 and abs(last - first) > 1800, "the clock was set while it ran"
    allranks("report", "run", folder=tmp_path)


@pytest.mark.full
def test_a_mapped_file_that_is_cut_short_is_named_as_a_cause(tmp_path: Path) -> None:
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, "task.fault=mapped", folder=tmp_path, check=None)
    (told,) = (event for event in Run.open(tmp_path / "run").events() if event["event"] == "verdict")
    assert "rank 1 on " in told["what"] and "SIGBUS" in told["what"] and "was cut short" in told["what"], ran.stderr
    assert "faulty.py" in Run.open(tmp_path / "run").log(1).read_text()


@pytest.mark.full
def test_killed_between_two_buckets_of_a_backward(tmp_path: Path, record_property: Record) -> None:
    """Each layer's gradients are a bucket: the last one's are under way when rank 1 dies."""
    words = ("task.fault=backward", "task.width=100000", "layout.ddp_bucket_mb=0.5")
    ran = allranks("train", FAULTY, *QUICK, *LIMITS, *words, folder=tmp_path)
    assert "rank 1 on" in ran.stderr and "SIGKILL" in ran.stderr
    (told,) = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "verdict"]
    assert told["kind"] == "restart" and "rank 1" in told["what"]
    assert list(steps(tmp_path / "run")) == list(range(1, 31))
    record_property("restart_seconds", restart_seconds(tmp_path / "run"))
    allranks("train", FAULTY, *QUICK, "--layout", "ddp", "--run", "whole", *words[1:], folder=tmp_path)
    digests = [tensor_digests(tmp_path / run, 30) for run in ("run", "whole")]
    assert digests[0] == digests[1]


@pytest.mark.full
def test_a_step_that_compiles_is_no_hang(tmp_path: Path) -> None:
    allranks("train", FAULTY, *QUICK, *LIMITS, "task.fault=compilation", folder=tmp_path)
    run = Run.open(tmp_path / "run")
    assert not [event for event in run.events() if event["event"] == "verdict"] and run.attempts == 1
    wanted = ("task.fault=compilation", "guard.compilation_seconds=2", "--run", "limited")
    allranks("train", FAULTY, *QUICK, *LIMITS, *wanted, folder=tmp_path)
    told = [event for event in Run.open(tmp_path / "limited").events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told] == ["straggler", "restart"]
    assert "guard.compilation_seconds" in told[0]["next"], told[0]


@pytest.mark.full
def test_all_workers_killed_at_once_are_one_restart(tmp_path: Path, record_property: Record) -> None:
    run = tmp_path / "run"
    words = (*QUICK[:-2], "train.steps=60", "--nproc", "3", "--layout", "ddp", "--run", "run")
    with running("train", FAULTY, *words, folder=tmp_path) as process:
        wait_for(lambda: 12 in steps(run) or process.poll() is not None, "step 12")
        for pid in worker_pids(run):
            os.kill(pid, signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert list(steps(run)) == list(range(1, 61)) and Run.open(run).attempts == 2
    record_property("restart_seconds", restart_seconds(run))
    (verdict,) = [event for event in Run.open(run).events() if event["event"] == "verdict"]
    assert verdict["kind"] == "restart" and "was killed by SIGKILL" in verdict["what"]


@pytest.mark.full
def test_a_hang_ends_the_run_with_its_verdict_last_on_the_screen(tmp_path: Path) -> None:
    wanted = (*QUICK, *LIMITS, "task.fault=straggler", "guard.hang=stop")
    ran = allranks("train", FAULTY, *wanted, folder=tmp_path, check=93)
    last = ran.stderr.strip().splitlines()[-2:]
    assert "rank 1 is busy at" in last[0] and "faulty.py" in last[0] and last[1].startswith("  next: look at")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb here (Debian: gdb)")
def test_a_worker_in_a_debugger_is_stopped(tmp_path: Path, record_property: Record) -> None:
    words = ("train.steps=300", "guard.slow_rank=off")  # on a busy machine one may be
    with running("train", FAULTY, *QUICK, *LIMITS, *words, folder=tmp_path) as command:
        held = worker_at(tmp_path / "run", step=20)
        with subprocess.Popen(
            ["gdb", "-q", "-nx", "-p", str(held)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as debugger:
            command.communicate(timeout=LIMIT_SECONDS)
            debugger.kill()
    assert command.returncode == 0
    told = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told] == ["stopped", "restart"] and "rank 1" in told[0]["what"]
    assert list(steps(tmp_path / "run")) == list(range(1, 301))
    record_property("restart_seconds", restart_seconds(tmp_path / "run"))


@pytest.mark.full
def test_a_worker_in_a_frozen_container_is_told_of_with_its_state(tmp_path: Path) -> None:
    """cgroup v1 lets nobody die who is frozen; so the run ends, and says who is left."""
    folder = Path(f"/sys/fs/cgroup/freezer/allranks-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root and cgroup v1")
    try:
        with running("train", FAULTY, *QUICK, *LIMITS, "train.steps=300", folder=tmp_path) as command:
            held = worker_at(tmp_path / "run", step=20)
            (folder / "cgroup.procs").write_text(str(held))
            (folder / "freezer.state").write_text("FROZEN")
            command.wait(LIMIT_SECONDS)
            (folder / "freezer.state").write_text("THAWED")
            said, _ = command.communicate(timeout=LIMIT_SECONDS)  # whoever is frozen holds the screen, too
            assert command.returncode == 76, said
            assert f"{held}" in said
            wait_for(lambda: not alive(held), "the end of who was killed")
    finally:
        (folder / "freezer.state").write_text("THAWED")
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), "an empty group")
        folder.rmdir()


def worker_at(run: Path, step: int) -> int:
    """The process of rank 1, once a step is made."""
    wait_for(lambda: step in steps(run), f"step {step}")
    return worker_pids(run)[1]
