"""The kernel's counts of what it ended for want of memory, and what they say of a SIGKILL."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allranks.failure import describe_signal
from allranks.surviving import memory_kill
from allranks.surviving.memory_kill import RecentKills, count_memory_kills, decode_kill

KILLED = describe_signal(9, rank=1, pid=7, when=0.0)


def test_a_count_that_rose_names_the_kernel() -> None:
    told = decode_kill(KILLED, {"/c/memory.events": 1}, {"/c/memory.events": 2}).render()
    assert "was killed by SIGKILL, most likely by the kernel for want of memory: oom_kill in /c/memory.events" in told
    assert "rose from 1 to 2 in the last 10 s; lower" in told
    system = str(memory_kill.SYSTEM)
    assert "or another process" in decode_kill(KILLED, {system: 1}, {system: 2}).render()


def test_a_count_that_stayed_names_somebody() -> None:
    told = decode_kill(KILLED, {"/c": 1}, {"/c": 1}).render()
    assert "the kernel counts nothing" in told and "somebody's kill -9" in told and "systemd-oomd" in told


def test_what_was_ended_days_ago_is_not_what_ends_now(monkeypatch: pytest.MonkeyPatch) -> None:
    now, count = [0.0], [3]
    monkeypatch.setattr("allranks.surviving.memory_kill.time.monotonic", lambda: now[0])
    monkeypatch.setattr(memory_kill, "count_memory_kills", lambda: {"/c": count[0]})
    kills = RecentKills()
    count[0] = 4  # a data worker, say
    assert "rose from 3 to 4" in kills.decode(KILLED).message
    for _ in range(100):
        now[0] += 0.25
        kills.look()
    assert "the kernel counts nothing" in kills.decode(KILLED).message
    count[0] = 5
    for _ in range(20):
        now[0] += 0.25
        kills.look()
    assert "rose from 4 to 5" in kills.decode(KILLED).message, "five seconds ago may be now"


def test_without_counts_both_are_possible() -> None:
    assert decode_kill(KILLED, {}, {}) == KILLED
    crash = describe_signal(11, rank=1, pid=7, when=0.0)
    assert decode_kill(crash, {"/c": 1}, {"/c": 2}) == crash


@pytest.mark.parametrize(
    ("membership", "file"),
    [("0::/user/a\n", "user/a/memory.events"), ("9:cpu:/\n8:memory:/job\n", "memory/job/memory.oom_control")],
)
def test_the_counts_of_a_container_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, file: str
) -> None:
    (tmp_path / "self").write_text(membership)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom 3\noom_kill 2\n")
    for name, path in (("MEMBERSHIP", tmp_path / "self"), ("MOUNT", tmp_path), ("SYSTEM", tmp_path / "absent")):
        monkeypatch.setattr(memory_kill, name, path)
    assert count_memory_kills() == {str(tmp_path / file): 2}


@pytest.mark.full
def test_a_real_kill_for_want_of_memory_is_counted() -> None:
    """A process in a container of 60 MB takes 200 MB (root and cgroup v1 only)."""
    folder = Path(f"/sys/fs/cgroup/memory/allranks-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root and cgroup v1")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(60 * 2**20))
        before = count_memory_kills()
        script = f"open('{folder}/cgroup.procs', 'w').write('0'); bytearray(b'x' * (200 << 20))"
        ran = subprocess.run([sys.executable, "-c", script], check=False, timeout=100)
        assert ran.returncode == -9
        assert "by the kernel for want of memory" in decode_kill(KILLED, before, count_memory_kills()).render()
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.05)
