"""The agent with real processes: who failed first, restarts, Ctrl-C, and what a kill -9 leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from allranks.process_environment import num_cores
from allranks.surviving.agent import LocalAgent, run_workers
from allranks.surviving.forkserver import StartMethod, choose_start_method
from allranks.surviving.outcome import Outcome
from allranks.surviving.trial_commands import GONE_SECONDS
from allranks.verdict import Decision
from tests.processes import is_gone, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.distributed
SPAWN = StartMethod("spawn", Decision("workers are spawned", "the test says so"))


def run(folder: Path, entry: str, *args: Any, nproc: int = 2, **options: Any) -> Outcome:
    return run_workers(
        f"tests.surviving.entries:{entry}",
        args,
        nproc=nproc,
        run_id="test",
        log_dir=folder,
        start_method=choose_start_method(),
        **options,
    )


def test_workers_find_each_other(small_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert run(tmp_path, "tell_environment", str(tmp_path), environ={"EXTRA": "x"}).exit_code == 0
    told = [dict(line.split("=") for line in (tmp_path / str(rank)).read_text().splitlines()) for rank in (0, 1)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in told] == [("0", "0", "2"), ("1", "1", "2")]
    assert {(one["MASTER_ADDR"], one["EXTRA"], one["cwd"]) for one in told} == {("127.0.0.1", "x", str(tmp_path))}
    assert {int(one["OMP_NUM_THREADS"]) for one in told} == {max(1, num_cores() // 2)}
    assert {one["held"] for one in told} == {"True"}


def test_workers_meet_in_the_agents_store(small_server: None, tmp_path: Path) -> None:
    assert run(tmp_path, "meet", str(tmp_path), nproc=3).exit_code == 0
    assert len(list(tmp_path.glob("met-*"))) == 3


def test_the_users_own_number_of_threads_is_kept(
    small_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    run(tmp_path, "tell_environment", str(tmp_path), nproc=1)
    assert "OMP_NUM_THREADS=7\n" in (tmp_path / "0").read_text()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 1, "ValueError: the user's own mistake"),
        ("refuse", 78, "no Task file"),
        ("SIGKILL", 76, "SIGKILL"),
        ("SIGSEGV", 1, "SIGSEGV"),
        ("SIGABRT", 1, "SIGABRT"),
    ],
)
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_failing_rank_is_named(
    small_server: None, tmp_path: Path, how: str, code: int, said: str, first: int
) -> None:
    outcome = run(tmp_path, "fail_in_turn", first, how)
    assert outcome.exit_code == code
    assert outcome.first_failure is not None
    assert outcome.first_failure.rank == first
    assert said in outcome.first_failure.render()
    assert "Connection closed" not in outcome.first_failure.render()


def test_a_consequence_that_comes_earlier_is_not_the_first(small_server: None, tmp_path: Path) -> None:
    outcome = run(tmp_path, "lose_peer_first")
    assert outcome.first_failure is not None
    assert outcome.first_failure.message == "ValueError: the cause, later by the clock"


@pytest.mark.parametrize("time", range(3))
def test_an_abort_of_nccls_is_no_crash(small_server: None, tmp_path: Path, time: int) -> None:
    outcome = run(tmp_path, "abort_as_nccl_does", str(tmp_path))
    assert outcome.first_failure is not None
    assert (outcome.exit_code, outcome.first_failure.rank) == (76, 0), "whichever of them came first"


def test_who_hangs_beside_a_failure_is_ended(small_server: None, tmp_path: Path) -> None:
    outcome = run(tmp_path, "hang_beside_failure")
    assert outcome.first_failure is not None
    assert (outcome.exit_code, outcome.first_failure.rank) == (1, 0)


def test_a_worker_that_returns_a_code_ends_the_run_with_it(small_server: None, tmp_path: Path) -> None:
    assert run(tmp_path, "code", 78, 1).exit_code == 78


def test_what_workers_were_writing_when_they_ended_is_removed(small_server: None, tmp_path: Path) -> None:
    assert run(tmp_path, "end_while_writing", str(tmp_path)).exit_code == 0
    assert not list(tmp_path.iterdir())


def test_restarts_have_a_store_of_their_own(small_server: None, tmp_path: Path) -> None:
    assert run(tmp_path, "restart", str(tmp_path), max_restarts=2).exit_code == 0
    ports = {(tmp_path / f"{attempt}-0").read_text() for attempt in range(3)}
    assert len(ports) == 3
    assert not list(tmp_path.glob("failure-*"))
    assert run(tmp_path, "restart", str(tmp_path), max_restarts=1).exit_code == 1


def test_a_refusal_is_not_tried_again(small_server: None, tmp_path: Path) -> None:
    assert run(tmp_path, "refuse", str(tmp_path), max_restarts=3).exit_code == 78
    assert not list(tmp_path.glob("1-*"))


class Command:
    """A command in a session of its own, as a shell would start it."""

    def __init__(self, folder: Path, entry: str, *args: Any, spawn: bool = True, **options: Any) -> None:
        wanted = {"spawn": spawn, "nproc": 2, "log_dir": str(folder), "entry": entry, "args": args, **options}
        self.folder = folder
        self.screen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.surviving.drive", json.dumps(wanted)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        wait_until(lambda: self.process.poll() is not None or len(self._started()) == 2)

    def _started(self) -> list[str]:
        """What the workers have written down: a file is there before its text."""
        return [text for path in self.folder.glob("started-*") if (text := path.read_text())]

    def terminal_signal(self, number: signal.Signals) -> None:
        """What a terminal does: every process of the foreground group gets it."""
        os.killpg(self.process.pid, number)

    def family(self) -> set[int]:
        """The command and all below it."""
        return {self.process.pid} | {child.pid for child in psutil.Process(self.process.pid).children(recursive=True)}

    def result(self) -> tuple[int, dict[str, Any]]:
        """Exit code and what it said; both workers are gone."""
        out, self.screen = self.process.communicate(timeout=100)
        assert all(is_gone(int(path.read_text())) for path in self.folder.glob("started-*"))
        said: dict[str, Any] = json.loads(out)
        return self.process.returncode, said

    def kill(self) -> None:
        """End everything, also what outlived the command."""
        left = self.family() if self.process.poll() is None else set()
        left |= {int(path.read_text()) for path in self.folder.glob("started-*")}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    """Commands put in here are ended after the test."""
    started: list[Command] = []
    yield started
    for command in started:
        command.kill()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("number", "to_all", "code"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGINT, False, 130),
        (signal.SIGTERM, False, 75),
        pytest.param(signal.SIGTERM, True, 75, marks=pytest.mark.full),
        (signal.SIGUSR1, True, 75),
        pytest.param(signal.SIGUSR1, False, 75, marks=pytest.mark.full),
    ],
)
def test_the_first_request_lets_workers_save(
    tmp_path: Path, commands: list[Command], number: signal.Signals, to_all: bool, code: int
) -> None:
    """What is sent to all, as a scheduler does, reaches the fork server too."""
    options: dict[str, Any] = {"stop_notice": "saving", "spawn": not to_all or number == signal.SIGINT}
    commands.append(command := Command(tmp_path, "train", str(tmp_path), 0.5, **options))
    command.terminal_signal(number) if to_all else command.process.send_signal(number)
    assert command.result() == (code, {"exit_code": code, "failure": None})
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert command.screen.splitlines() == ["saving"]


def test_the_second_ctrl_c_means_now(tmp_path: Path, commands: list[Command]) -> None:
    commands.append(command := Command(tmp_path, "never_mind", str(tmp_path), stop_grace_seconds=600))
    command.terminal_signal(signal.SIGINT)
    time.sleep(0.5)
    assert command.process.poll() is None
    command.terminal_signal(signal.SIGINT)
    assert command.result() == (130, {"exit_code": 130, "failure": None})


def test_the_second_request_does_not_wait_for_the_grace() -> None:
    """Whom SIGKILL does not end is left behind then, and not when the first request's time is over."""
    sent: list[signal.Signals] = []
    agent: Any = object.__new__(LocalAgent)
    agent.interrupts = SimpleNamespace(first=signal.SIGINT, urgent=False)
    agent._workers, agent._kill_at, agent._stop_grace_seconds = SimpleNamespace(signal=sent.append), None, 600.0
    agent._pass_on()
    assert agent._kill_at > time.monotonic() + 500
    agent.interrupts.urgent = True
    agent._pass_on()
    assert agent._kill_at <= time.monotonic() and sent == [signal.SIGINT, signal.SIGKILL]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 76)])
def test_the_grace_ends(tmp_path: Path, commands: list[Command], number: signal.Signals, code: int) -> None:
    commands.append(command := Command(tmp_path, "never_mind", str(tmp_path), stop_grace_seconds=0.5))
    command.process.send_signal(number)
    assert command.result() == (code, {"exit_code": code, "failure": None})


@pytest.mark.parametrize("spawn", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_killed_command_leaves_nothing(
    tmp_path: Path, commands: list[Command], record_property: Callable[[str, object], None], spawn: bool
) -> None:
    commands.append(command := Command(tmp_path, "never_mind", str(tmp_path), spawn=spawn))
    family = command.family()
    assert len(family) >= (4 if spawn else 5)  # the command, its resource tracker, (the fork server,) two workers
    killed = time.monotonic()
    os.kill(command.process.pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in family), GONE_SECONDS)
    record_property("gone_seconds", round(time.monotonic() - killed, 2))


@pytest.mark.full
def test_a_killed_fork_server_takes_its_workers_along(tmp_path: Path, commands: list[Command]) -> None:
    commands.append(command := Command(tmp_path, "never_mind", str(tmp_path), spawn=False))
    (server,) = {psutil.Process(int(path.read_text())).ppid() for path in tmp_path.glob("started-*")}
    assert server != command.process.pid
    os.kill(server, signal.SIGKILL)
    code, said = command.result()
    assert code == said["exit_code"] == 76
