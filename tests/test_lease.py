"""One holder at most, between real processes, however the holder dies."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allranks.errors import RunError
from allranks.lease import Holder, Lease

HOLD = """
import os, sys, pathlib, time
from allranks.lease import Lease
lease = Lease(pathlib.Path(sys.argv[1]))
lease.acquire()
child = os.fork() if sys.argv[2] == "fork" else None
if child == 0:
    sys.stdout.close()
    time.sleep(30)
print(child or 0, flush=True)
time.sleep(30)
"""


@contextmanager
def holding(path: Path, mode: str = "alone") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the lease, and the pid of its forked child (0: none)."""
    command = [sys.executable, "-c", HOLD, str(path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            if child:
                os.kill(child, signal.SIGKILL)


def test_a_second_process_is_refused_with_host_pid_and_since_when(tmp_path: Path) -> None:
    with holding(tmp_path / "lease") as (process, _):
        start = time.monotonic()
        with pytest.raises(RunError) as caught:
            Lease(tmp_path / "lease").acquire()
        assert time.monotonic() - start < 2
        year = time.strftime("%Y-%m-%d")
        assert f"{tmp_path} is in use by pid {process.pid} on {socket.gethostname()} since {year}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_holder_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with holding(tmp_path / "lease") as (process, _):
        process.send_signal(signal.SIGKILL)
        process.wait()
        lease = Lease(tmp_path / "lease")
        assert lease.holder() is None
        lease.acquire()
        lease.release()


def test_a_forked_child_does_not_keep_the_lease_of_its_killed_parent(tmp_path: Path) -> None:
    with holding(tmp_path / "lease", "fork") as (process, child):
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(child, 0)
        Lease(tmp_path / "lease").acquire()


def test_a_fork_takes_nothing_from_the_parent(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    lease.acquire()
    child = os.fork()
    if child == 0:
        lease.release()
        os._exit(0)
    os.waitpid(child, 0)
    holder = Lease(tmp_path / "lease").holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    lease.release()


def test_release_lets_the_next_one_in_and_may_be_called_twice(tmp_path: Path) -> None:
    first, second = Lease(tmp_path / "lease"), Lease(tmp_path / "lease")
    first.acquire()
    first.acquire()
    with pytest.raises(RunError, match=f"pid {os.getpid()} "):
        second.acquire()
    first.release()
    first.release()
    second.acquire()
    assert first.holder() is not None
    second.release()
    assert first.holder() is None


def test_holder_of_a_lease_that_nobody_ever_took_makes_no_file(tmp_path: Path) -> None:
    assert Lease(tmp_path / "lease").holder() is None
    assert os.listdir(tmp_path) == []


def test_a_refusal_without_knowing_the_holder(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    lease.acquire()
    (tmp_path / "lease").write_text("no JSON")
    with pytest.raises(RunError, match="in use by another process"):
        Lease(tmp_path / "lease").acquire()
    unknown = Lease(tmp_path / "lease").holder()
    assert unknown is not None
    assert unknown.pid == 0
    lease.release()


def test_it_is_taken_from_a_deposed_holder_that_lives_and_from_nobody_else(tmp_path: Path) -> None:
    path, here = tmp_path / "lease", socket.gethostname()
    with holding(path) as (process, _):
        process.send_signal(signal.SIGSTOP)  # frozen: it does not know, and keeps its lock
        for others in ((), [(here, process.pid + 1), ("elsewhere", process.pid)]):
            with pytest.raises(RunError, match=f"in use by pid {process.pid}"):
                Lease(path).acquire(others)
        mine = Lease(path)
        mine.acquire([("elsewhere", 1), (here, process.pid)])
        process.send_signal(signal.SIGCONT)
        with pytest.raises(RunError, match=f"in use by pid {os.getpid()}"):
            Lease(path).acquire([(here, process.pid)])
        process.kill()
        process.wait()
        holder = mine.holder()
        assert holder is not None and holder.pid == os.getpid(), "its end frees what it had, and nothing else"
        mine.release()
        assert mine.holder() is None and [one.name for one in tmp_path.iterdir()] == ["lease"]


def test_who_took_it_while_this_process_did_not_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, deposed = tmp_path / "lease", [(socket.gethostname(), os.getpid())]
    old, newer, late = Lease(path), Lease(path), Lease(path)
    old.acquire()
    old.check()
    hold = Lease._hold

    def freeze(lease: Lease, descriptor: int) -> None:
        hold(lease, descriptor)
        if lease is late:
            newer.acquire(deposed)

    monkeypatch.setattr(Lease, "_hold", freeze)
    with pytest.raises(RunError, match="in use by"):
        late.acquire(deposed)
    newer.check()
    late.check()  # it holds nothing
    with pytest.raises(RunError, match="it was taken from this process, which was silent"):
        old.check()
    assert [one.name for one in tmp_path.iterdir()] == ["lease"]
    old.release()
    assert newer.holder() is not None
    newer.release()


def test_a_lock_on_a_file_that_was_replaced_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / "lease", fcntl.flock
    (tmp_path / "other").touch()

    def replace_once(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if (tmp_path / "other").exists():
            (tmp_path / "other").replace(path)

    monkeypatch.setattr(fcntl, "flock", replace_once)
    lease = Lease(path)
    lease.acquire()
    with pytest.raises(RunError, match=f"in use by pid {os.getpid()}"):
        Lease(path).acquire()
    lease.release()


def test_it_stands_for_as_long_as_its_file_has_its_name(tmp_path: Path) -> None:
    lease = Lease(tmp_path / "lease")
    assert not lease.stands()
    lease.acquire()
    assert lease.stands()
    (tmp_path / "lease").unlink()
    assert not lease.stands()
    (tmp_path / "lease").write_text("another")
    assert not lease.stands()
    lease.release()


@pytest.mark.parametrize("text", ['{"host": 1, "pid": "x", "since": "y"}', "[" * 200_000, '{"host": "a", "pid": 1}'])
def test_a_lease_that_says_nothing_of_its_holder_is_held_all_the_same(tmp_path: Path, text: str) -> None:
    lease = Lease(tmp_path / "lease")
    lease.acquire()
    (tmp_path / "lease").write_text(text)
    assert Lease(tmp_path / "lease").holder() == Holder("an unknown host", 0, 0.0)
    with pytest.raises(RunError, match="is in use by another process"):
        Lease(tmp_path / "lease").acquire()
    lease.release()


def test_what_nobody_can_lock_has_no_holder(tmp_path: Path) -> None:
    (tmp_path / "lease").symlink_to(tmp_path / "lease")
    os.mkfifo(tmp_path / "pipe")
    assert Lease(tmp_path / "lease").holder() is None and Lease(tmp_path / "pipe").holder() is None


def test_a_link_in_its_place_empties_no_other_file(tmp_path: Path) -> None:
    """As in a run directory that somebody else has made."""
    (tmp_path / "thesis").write_text("all of it")
    (tmp_path / "lease").symlink_to("thesis")
    with pytest.raises(OSError, match="symbolic links"):
        Lease(tmp_path / "lease").acquire()
    assert (tmp_path / "thesis").read_text() == "all of it"
