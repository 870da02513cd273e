"""The worker processes of this host, seen from the agent."""

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from allranks.surviving import unended
from allranks.surviving import workers as module
from allranks.surviving.beats import SharedBeats
from allranks.surviving.child import WorkerStart
from allranks.surviving.forkserver import start
from allranks.surviving.workers import LocalWorkers
from tests.processes import is_gone, wait_until

pytestmark = pytest.mark.distributed


def starts(folder: Path, entry: str, *args: Any, nproc: int = 2) -> list[WorkerStart]:
    return [
        WorkerStart(
            rank=rank,
            agent_pid=os.getpid(),
            environ=os.environ | {"RANK": str(rank)},
            folder=folder,
            log_dir=folder,
            num_threads=1,
            entry=f"tests.surviving.entries:{entry}",
            args=args,
        )
        for rank in range(nproc)
    ]


def wait_for_all(workers: LocalWorkers) -> None:
    deadline = time.monotonic() + 60
    while workers.alive:
        assert time.monotonic() < deadline
        workers.wait(1.0)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_exits_and_replies(small_server: None, tmp_path: Path, method: str) -> None:
    if method == "forkserver" and sys.platform != "linux":
        pytest.skip("fork servers are Linux's")
    start()
    before = time.time()
    workers = LocalWorkers(method, starts(tmp_path, "reply", 5), replies=True)
    assert sorted(workers.pids) == [0, 1]
    wait_for_all(workers)
    assert workers.replies == {0: b"0" * 5, 1: b"1" * 5}
    assert {place: one.code for place, one in workers.exits.items()} == {0: 0, 1: 1}
    assert all(before < one.when < time.time() for one in workers.exits.values())
    assert workers.killed == set()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ctrl_c_is_held_back_until_a_worker_is_ready(small_server: None, tmp_path: Path, method: str) -> None:
    if method == "forkserver":
        start()
    workers = LocalWorkers(method, starts(tmp_path, "tell_environment", str(tmp_path)), replies=False)
    wait_for_all(workers)
    assert all((tmp_path / str(rank)).read_text().endswith("held=True") for rank in (0, 1))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_reply_larger_than_a_pipe(small_server: None, tmp_path: Path) -> None:
    workers = LocalWorkers("spawn", starts(tmp_path, "reply", 3_000_000), replies=True)
    wait_for_all(workers)
    assert [len(reply) for reply in workers.replies.values()] == [3_000_000, 3_000_000]


def test_signals_and_kill(small_server: None, tmp_path: Path) -> None:
    workers = LocalWorkers("spawn", starts(tmp_path, "train", str(tmp_path), 0.0), replies=False)
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    os.kill(workers.pids[0], signal.SIGKILL)
    workers.wait(60)
    assert workers.alive == [1]
    assert workers.exits[0].code == -signal.SIGKILL
    workers.signal(signal.SIGINT)
    workers.wait(60)
    assert workers.exits[1].code == 130
    assert workers.killed == set()
    workers.kill()  # of none


@pytest.mark.skipif(sys.platform != "linux", reason="fork servers are Linux's")
def test_a_lost_server_is_told_from_lost_workers(small_server: None, tmp_path: Path) -> None:
    start()
    for lost in (False, True):
        workers = LocalWorkers("forkserver", starts(tmp_path, "never_mind", str(tmp_path)), replies=False)
        wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
        os.kill(psutil.Process(workers.pids[0]).ppid() if lost else workers.pids[0], signal.SIGKILL)
        workers.wait(60)
        assert workers.lost_their_server == lost
        workers.kill()
        for path in tmp_path.glob("started-*"):
            path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="fork servers are Linux's")
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_exit_code_255_is_one_like_any_other(small_server: None, tmp_path: Path, method: str) -> None:
    start()
    workers = LocalWorkers(method, starts(tmp_path, "code", 255, 1), replies=False)
    wait_for_all(workers)
    assert workers.exits[1].code == 255 and not workers.lost_their_server


class Undying(ForkServerProcess):
    """A worker in a system call that never returns."""

    exitcode: int | None = None

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pipe = os.pipe()

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def sentinel(self) -> int:
        return self._pipe[0]

    def __hash__(self) -> int:
        return id(self)


class Slow(Undying):
    """Ends at a moment, as its exit code says from then on."""

    def __init__(self, pid: int, end: float) -> None:
        super().__init__(pid)
        self._end = end

    @property
    def exitcode(self) -> int | None:  # type: ignore[override]
        return None if time.monotonic() < self._end else -9

    def join(self, timeout: float | None = None) -> None:
        pass


@pytest.mark.parametrize("leaving", [0.3, 60.0])
def test_who_has_ended_is_given_time_to_leave_its_memory(monkeypatch: pytest.MonkeyPatch, leaving: float) -> None:
    """The main thread of one that held a GPU is gone long before the kernel tells its end."""
    monkeypatch.setattr(module, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(module, "LEAVING_SECONDS", 1.5 if leaving == 60.0 else 20.0)
    monkeypatch.setattr(module, "process_state", lambda pid: "Z")
    monkeypatch.setattr(unended, "_killed", [])
    workers = LocalWorkers("spawn", [], replies=False)
    workers._ranks = [4]
    workers._processes[0] = slow = Slow(2**22 + 1, time.monotonic() + leaving)
    workers.kill()
    assert workers.alive == []
    assert (workers.left is None) == (slow.exitcode is not None) == (leaving < 1)


def test_who_does_not_die_is_told_and_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "KILL_SECONDS", 0.05)
    monkeypatch.setattr(module, "process_state", lambda pid: "D")
    monkeypatch.setattr(module, "waits_in", lambda pid: "rpc_wait_bit_killable")
    monkeypatch.setattr(unended, "_killed", [])
    workers = LocalWorkers("spawn", [], replies=False)
    workers._ranks = [4]
    workers._processes[0] = undying = Undying(2**22 + 1)
    multiprocessing.process._children.add(undying)  # type: ignore[attr-defined]
    workers.kill()
    assert workers.alive == [] and workers.left is not None
    assert (workers.left.rank, workers.left.exit_code) == (4, 76)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"pid {2**22 + 1} does not end, though it was killed: state D" in line
    assert "in the kernel's rpc_wait_bit_killable" in line
    assert undying not in multiprocessing.process._children, "the interpreter's end waits for all of these"  # type: ignore[attr-defined]
    assert unended.hinders_the_end()
    (one,) = workers.ended(None)
    assert one.killed and one.rank == 4
    workers.kill()  # waits for it no second time
    assert capsys.readouterr().err == ""
    undying.exitcode = -9
    assert not unended.hinders_the_end()


def test_who_has_not_said_that_it_has_finished_has_not(small_server: None, tmp_path: Path) -> None:
    beats = SharedBeats(2)
    beats.clear()
    both = [replace(one, beats=beats.path, slot=one.rank) for one in starts(tmp_path, "leave_silently", 1)]
    workers = LocalWorkers("spawn", both, replies=False)
    wait_for_all(workers)
    found = {one.rank: (one.code, one.finished, one.step) for one in workers.ended(beats)}
    assert found == {0: (0, True, 3), 1: (0, False, 3)}
    beats.close()


def test_kill_ends_all_at_once(small_server: None, tmp_path: Path) -> None:
    workers = LocalWorkers("spawn", starts(tmp_path, "never_mind", str(tmp_path)), replies=False)
    wait_until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    workers.kill()
    assert workers.alive == []
    assert workers.killed == {0, 1}
    assert all(is_gone(pid) for pid in workers.pids.values())


def test_where_one_cannot_start_none_stays(small_server: None, tmp_path: Path) -> None:
    good, bad = starts(tmp_path, "never_mind", str(tmp_path))
    object.__setattr__(bad, "args", (lambda: None,))  # cannot be pickled
    with pytest.raises(Exception, match="pickle"):
        LocalWorkers("spawn", [good, bad], replies=False)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
