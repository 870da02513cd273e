"""Hangs, crashes and restarts through the agent, with real processes and real signals, which train without torch."""

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allranks.config_guard import GuardConfig
from allranks.errors import RollbackError
from allranks.failure import NO_PROGRESS, PREEMPTED, RAISED, TRANSIENT, Failure, describe_error, log_file
from allranks.observing.heartbeat import LONGEST, MARK, PHASE, PHASES, STEP, Heartbeat
from allranks.run import Run
from allranks.surviving import evidence, monitor, unended, workers
from allranks.surviving import supervisor as module
from allranks.surviving.agent import run_workers
from allranks.surviving.forkserver import choose_start_method
from allranks.surviving.monitor import Alarm, Row
from allranks.surviving.outcome import Outcome
from allranks.surviving.supervisor import Supervision, Supervisor
from allranks.verdict import Verdict
from tests.surviving.rows import collective, row, witness

pytestmark = pytest.mark.distributed
QUICK: dict[str, Any] = {"hang_seconds": 1.5, "stopped_seconds": 1.0, "input_seconds": 60.0}


def train(
    folder: Path, fault: str, times: int = 1, entry: str = "steps", **guard: Any
) -> tuple[Outcome, list[Verdict], int]:
    """The outcome, what was told, and the number of attempts."""
    told: list[Verdict] = []
    again: list[int] = []
    outcome = run_workers(
        f"tests.surviving.entries:{entry}",
        (str(folder), fault, times),
        nproc=2,
        run_id="test",
        log_dir=folder,
        start_method=choose_start_method(),
        supervision=Supervision(GuardConfig(**{**QUICK, **guard}), told.append, lambda: again.append(1)),
    )
    attempts = len(list(folder.glob("*-0")))
    assert len(again) == attempts - 1, (outcome, told, sorted(path.name for path in folder.iterdir()))
    return outcome, told, attempts


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("hang", "stuck"),
        pytest.param("lock", "stuck", marks=pytest.mark.full),
        ("SIGSTOP", "stopped"),
        ("data", "data"),
    ],
)
def test_a_hang_is_told_with_its_line_and_the_workers_start_again(
    small_server: None, tmp_path: Path, fault: str, kind: str
) -> None:
    outcome, told, attempts = train(tmp_path, fault, input_seconds=2.0)
    assert (outcome.exit_code, outcome.first_failure, attempts) == (0, None, 2)
    # Loading is told of first and ended later; a machine that is late may see both at once.
    assert list(dict.fromkeys(verdict.kind for verdict in told)) == [kind, "restart"]
    assert "rank 1" in told[0].what and "after step 7" in told[-1].what
    assert fault == "SIGSTOP" or any("entries.py" in line and "meet_fault" in line for line in told[0].evidence)


def test_a_hang_ends_the_run_where_the_config_says_so(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "hang", hang="stop")
    assert (outcome.exit_code, attempts) == (NO_PROGRESS, 1)
    assert outcome.first_failure is not None and outcome.first_failure.rank == 1
    assert "no progress for" in outcome.first_failure.render() and "next: look at" in outcome.first_failure.render()
    assert "(guard.hang=stop)" in told[0].evidence[-1]


def test_nothing_hangs_in_a_run_that_is_only_slow(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "slow data")
    assert (outcome.exit_code, attempts) == (0, 1)
    assert [verdict.kind for verdict in told] == ["data", "goes_on"]
    assert "nothing follows yet" in told[0].evidence[-1]


def test_a_save_that_does_not_return_is_told_of_and_left_in_peace(
    small_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "LEAST_SAVE_SECONDS", 1.0)
    outcome, told, attempts = train(tmp_path, "slow save")
    assert (outcome.exit_code, attempts) == (0, 1)
    assert [verdict.kind for verdict in told] == ["disk", "goes_on"]
    assert "rank 1 is waiting for a disk at " in told[0].what and "entries.py:" in told[0].what
    assert told[0].what.endswith("in meet_fault; it may take 1800 s")
    assert "nothing follows yet" in told[0].evidence[-1] and "guard.checkpoint_seconds" in told[0].evidence[-1]
    assert told[1].what == "the run goes on: rank 1 has its checkpoint behind it; it was slow and did not hang"


def test_a_slow_save_is_over_when_who_saves_is_past_it_whoever_is_in_its_way(tmp_path: Path) -> None:
    supervisor = Supervisor(Supervision(GuardConfig(), print, lambda: None), 2, tmp_path)
    alarm = Alarm("slow", (0,), 30.0, act=False, phase="checkpoint")
    saving = witness(0, collective(12), phase="checkpoint", quiet_seconds=31.0)
    ruling = supervisor.judge([saving, witness(1, collective(11, waits=False))], alarm)
    assert ruling is not None and ruling.verdict.kind == "straggler" and "rank 1 is busy" in ruling.verdict.what
    assert ruling.goes_on([saving.row, row(1)]) is None, "rank 1 was in a step all the while"
    told = ruling.goes_on([row(0), row(1)])
    assert told is not None and told.what.startswith("the run goes on: rank 0 has its checkpoint behind it")
    supervisor.monitor.beats.close()


def test_a_disk_that_does_not_answer_keeps_no_verdict(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logs and its journal are on the disk that hangs: pipes without another end."""
    monkeypatch.setattr(module, "DISK_SECONDS", 0.5)
    journal = run.journal()
    journal.unlink(missing_ok=True)
    journal.parent.mkdir(exist_ok=True)
    logs = run.path / "pipes"
    logs.mkdir()
    os.mkfifo(log_file(logs, 0))
    supervisor = Supervisor(Supervision.of_run(run, GuardConfig()), 1, logs)
    supervisor.begin_attempt(1)
    supervisor.monitor.beats.slot(0)[PHASE] = PHASES.index("checkpoint")
    (seen,) = supervisor.question({0: os.getpid()}, {0: 0})
    assert (seen.row.rank, seen.row.phase, seen.stack) == (0, "checkpoint", ())
    never = threading.Event()
    monkeypatch.setattr("allranks.observing.journal.os.write", lambda *_: never.wait())
    Supervision.of_run(run, GuardConfig()).tell(Verdict("disk", "rank 0 is waiting for a disk", (), "look"))
    never.set()
    supervisor.monitor.beats.close()
    said = capsys.readouterr().err
    assert "rank 0 is waiting for a disk" in said
    assert said.splitlines()[-1] == "warning: this verdict is not in the journal: its disk does not answer"


def test_an_evaluation_may_take_its_time(small_server: None, tmp_path: Path) -> None:
    assert train(tmp_path, "evaluation")[1] == []


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSEGV"])
def test_a_killed_worker_starts_again(small_server: None, tmp_path: Path, fault: str) -> None:
    outcome, told, attempts = train(tmp_path, fault)
    assert (outcome.exit_code, attempts) == (0, 2)
    (verdict,) = told
    assert verdict.kind == "restart" and f"was killed by {fault}" in verdict.what and "step 7" in verdict.what


@pytest.mark.skipif(sys.platform != "linux", reason="fork servers are Linux's")
def test_workers_start_again_from_another_server_where_theirs_was_killed(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "server")
    assert (outcome.exit_code, attempts) == (0, 2)
    assert [verdict.kind for verdict in told] == ["restart"] and "was killed by SIGKILL" in told[0].what


def test_a_crash_at_the_same_step_each_time_ends_with_93(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "SIGKILL", times=99, restarts=2)
    assert (outcome.exit_code, attempts) == (NO_PROGRESS, 3)
    assert outcome.first_failure is not None
    assert "3 attempts in a row ended without a step after step 7" in outcome.first_failure.render()
    assert [verdict.kind for verdict in told] == ["restart", "restart"]


def test_without_restarts_the_failure_keeps_its_code(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "SIGKILL", restarts=0)
    assert (outcome.exit_code, told, attempts) == (TRANSIENT, [], 1)


def test_an_error_of_the_users_is_not_tried_again(small_server: None, tmp_path: Path) -> None:
    outcome, told, attempts = train(tmp_path, "raise")
    assert (outcome.exit_code, told, attempts) == (RAISED, [], 1)
    assert outcome.first_failure is not None and "the user's own mistake" in outcome.first_failure.render()


def test_a_hung_worker_that_cannot_be_killed_ends_the_run_and_nothing_starts_beside_it(
    small_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = workers._wait_for_code

    def wait(process: Any, seconds: float) -> int | None:
        code = real(process, seconds)
        return None if process.name == "allranks-worker-1" and code == -9 else code

    monkeypatch.setattr(workers, "_wait_for_code", wait)
    monkeypatch.setattr(unended, "_killed", [])
    outcome, told, attempts = train(tmp_path, "hang")
    assert (outcome.exit_code, attempts) == (TRANSIENT, 1)
    assert [verdict.kind for verdict in told] == ["stuck"]
    assert outcome.first_failure is not None
    shown = outcome.first_failure.render()
    assert "no progress for" in shown and "does not end, though it was killed" in shown.splitlines()[-1]


@pytest.mark.parametrize("way", ["sys.exit", "0", "75"])
def test_who_leaves_before_the_end_ends_the_run_and_is_named(small_server: None, tmp_path: Path, way: str) -> None:
    outcome, told, attempts = train(tmp_path, way, entry="leave")
    assert (outcome.exit_code, told, attempts) == (RAISED, [], 1)
    assert outcome.first_failure is not None and outcome.first_failure.rank == 1
    assert "after step 7" in outcome.first_failure.message
    assert outcome.others == (0,), "which says that its connection was closed"


def test_a_verdict_that_cannot_be_written_is_told_and_ends_nothing(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("allranks.observing.journal.os.write", refuse)
    Supervision.of_run(run, GuardConfig()).tell(Verdict("stuck", "no progress for 15 s", (), "look"))
    said = capsys.readouterr().err
    assert "no progress for 15 s" in said
    assert said.splitlines()[-1].startswith("warning: this verdict is not in the journal: ")
    assert "No space left on device" in said


def test_rollbacks_are_not_started_again_where_nothing_is(tmp_path: Path) -> None:
    supervisor = Supervisor(Supervision(GuardConfig(restarts=0), lambda verdict: None, lambda: None), 1, tmp_path)
    assert not supervisor.may_restart(describe_error(RollbackError("the loss of step 9 is a spike"), 0))
    supervisor.monitor.beats.close()


def test_attempts_that_come_further_cost_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor(Supervision(GuardConfig(restarts=1), lambda verdict: None, lambda: None), 1, tmp_path)
    lost = Failure(0, "h", 1, time.time(), TRANSIENT, "was killed", signal="SIGKILL")
    allowed = []
    for step in (0, 5, 9, 9):
        supervisor.monitor.furthest_step = step
        allowed.append(supervisor.may_restart(lost))
    assert allowed == [True, True, True, False]
    back = describe_error(RollbackError("the loss of step 9 is a spike"), 0)
    assert [supervisor.may_restart(back) for _ in range(4)] == [True] * 4, "several spikes behind one checkpoint"
    assert not supervisor.may_restart(lost), "they give nothing back either"
    preempted = Failure(0, "h", 1, time.time(), PREEMPTED, "saved")
    assert not supervisor.may_restart(preempted)
    supervisor.monitor.beats.close()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_that_goes_on_while_it_is_judged_is_not_ended(
    tmp_path: Path, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Verdict] = []
    supervisor = Supervisor(Supervision(GuardConfig(hang_seconds=0.1), told.append, lambda: None), 2, tmp_path)
    supervisor.begin_attempt(2)
    for place in (0, 1):
        slot = supervisor.monitor.beats.slot(place)
        slot[PHASE], slot[STEP] = PHASES.index("step"), 7
    supervisor.monitor.beats.slot(1)[STEP] = 8  # of a worker that has ended
    time.sleep(0.2)

    def ask(rows: Sequence[Row], *_: object) -> list[evidence.Testimony]:
        if goes_on:
            supervisor.monitor.beats.slot(0)[MARK] = time.monotonic_ns()
        return [evidence.Testimony(row) for row in rows]

    monkeypatch.setattr("allranks.surviving.supervisor.question", ask)
    failure = supervisor.look({0: os.getpid()}, {0: 0, 1: 1})
    supervisor.monitor.beats.close()
    assert (failure is None, told == []) == (goes_on, goes_on)


@pytest.mark.parametrize("parted", [False, True])
def test_a_step_longer_than_any_ends_the_run_only_where_ranks_prove_it(
    tmp_path: Path, parted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Verdict] = []
    supervisor = Supervisor(Supervision(GuardConfig(), told.append, lambda: None), 2, tmp_path)
    supervisor.begin_attempt(2)
    for place in (0, 1):
        slot = supervisor.monitor.beats.slot(place)
        slot[PHASE], slot[STEP], slot[LONGEST] = PHASES.index("step"), 7, 20 * 10**9
        slot[MARK] = time.monotonic_ns() - 30 * 10**9
    monkeypatch.setattr(supervisor.monitor, "_awake_since", 0.0)

    def ask(rows: Sequence[Row], *_: object) -> list[evidence.Testimony]:
        waits = [collective(12), collective(12, name="broadcast" if parted else "all_reduce")]
        return [evidence.Testimony(row, (), (waits[row.rank],)) for row in rows]

    monkeypatch.setattr("allranks.surviving.supervisor.question", ask)
    failure = supervisor.look(dict.fromkeys((0, 1), os.getpid()), {0: 0, 1: 1})
    supervisor.monitor.beats.close()
    assert (failure is not None, [one.kind for one in told]) == (parted, ["divergence"] if parted else [])


def test_the_runs_time_is_over_where_any_worker_shows_it(tmp_path: Path) -> None:
    supervisor = Supervisor(Supervision(GuardConfig(), lambda verdict: None, lambda: None), 2, tmp_path)
    supervisor.begin_attempt(2)
    assert not supervisor.time_is_over(), "no limit"
    hearts = [Heartbeat(supervisor.monitor.beats.slot(place)) for place in (0, 1)]
    hearts[1].time_over(time.monotonic() + 3600)
    assert not supervisor.time_is_over()
    hearts[1].time_over(time.monotonic())
    assert supervisor.time_is_over()
    supervisor.begin_attempt(2)
    assert not supervisor.time_is_over()
    supervisor.monitor.beats.close()


def test_a_successor_tells_whom_it_succeeds(tmp_path: Path) -> None:
    told: list[Verdict] = []
    supervisor = Supervisor(Supervision(GuardConfig(restarts=1), told.append, lambda: None), 1, tmp_path)
    supervisor.succeeding(Failure(0, "node-1", 7, time.time(), TRANSIENT, "its host led the run, and is lost"))
    supervisor.succeeding(Failure(0, "node-1", 7, time.time(), PREEMPTED, "its host led the run, and has left"))
    supervisor.monitor.beats.close()
    verdict, other = told
    assert verdict.kind == "restart" and supervisor.restarts == 1, "who has left costs none"
    assert other.kind == "leave" and other.what.startswith("rank 0 on node-1: its host led the run, and has left; ")
    assert verdict.what.startswith("restart 1: rank 0 on node-1: its host led the run, and is lost; ")
    assert verdict.what.endswith(f"{socket.gethostname()} leads from now on")


def test_hosts_that_join_or_leave_are_told_and_cost_nothing(tmp_path: Path) -> None:
    told: list[Verdict] = []
    attempts: list[None] = []
    supervisor = Supervisor(
        Supervision(GuardConfig(restarts=1), told.append, lambda: attempts.append(None)), 1, tmp_path
    )
    supervisor.monitor.furthest_step = 7
    supervisor.admitting(["b"])
    supervisor.leaving(["b", "c"])
    supervisor.tell(Verdict("network", "waiting for the network: 1 of 2 ways is closed", (), "nothing"))
    supervisor.monitor.beats.close()
    assert [verdict.kind for verdict in told] == ["join", "leave", "network"] and len(attempts) == 2
    assert told[1].what == "after step 7, which is saved, b, c leaves, asked to stop"
    assert supervisor.restarts == 0
