"""The kernel's counts of what it ended for want of memory, and what they say of a SIGKILL."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from allranks.failure import describe_signal
from allranks.run import Run
from allranks.surviving import memory_kill
from allranks.surviving.memory_kill import RecentKills, count_memory_kills, decode_kill
from tests.commands import PROGRAMS, allranks, steps
from tests.memory_group import memory_group

FAULTY = str(PROGRAMS / "faulty.py")
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
    """A process in a container of 60 MB takes 200 MB."""
    with memory_group(60 * 2**20) as folder:
        before = count_memory_kills()
        script = f"open('{folder}/cgroup.procs', 'w').write('0'); bytearray(b'x' * (200 << 20))"
        ran = subprocess.run([sys.executable, "-c", script], check=False, timeout=100)
        assert ran.returncode == -9
        assert "by the kernel for want of memory" in decode_kill(KILLED, before, count_memory_kills()).render()


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("fault", "code"), [("memory", 0), ("memory again", 93)])
def test_a_run_whose_rank_the_kernel_kills_for_want_of_memory_is_told_so(tmp_path: Path, fault: str, code: int) -> None:
    """Rank 1 takes 8 GB in its 15th forward, of the 2 GB that all may take: once, or in every attempt."""
    quick = ("train.steps=30", "train.global_batch=8", "checkpoint.every=5", "--nproc", "2", "--layout", "ddp")
    limit = 2 * 10**9 // 4096 * 4096  # in whole pages, as the kernel keeps it
    with memory_group(limit) as folder:
        inside = ("sh", "-c", f'echo 0 > {folder}/cgroup.procs && exec "$@"', "sh")
        words = ("train", FAULTY, *quick, f"task.fault={fault}", "guard.restarts=1", "--run", "run")
        ran = allranks(*words, folder=tmp_path, check=code, launcher=inside)
    told = [event for event in Run.open(tmp_path / "run").events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told] == ["restart"], ran.stderr
    at = re.search(r"after step (1[0-4]): rank 1 .* SIGKILL, most likely by the kernel", told[0]["what"])
    assert at is not None, told
    assert run_ended_as_documented(tmp_path / "run", code, int(at[1]), ran.stderr)
    name = folder.name
    assert re.search(rf"oom_kill in \S*{name}/\S+ rose from 0 to 1 in the last \d+ s, and its processes", ran.stderr)
    assert "may take 2.0 GB together; lower train.micro_batch" in ran.stderr


def run_ended_as_documented(run: Path, code: int, last: int, said: str) -> bool:
    """It has gone on from its checkpoint to its last step; or, met by the same again, it ends and says in which step.

    Args:
        last: the step after which the kernel killed first.
        said: by the command.
    """
    if code == 0:
        return list(steps(run)) == list(range(1, 31)) and Run.open(run).attempts == 2
    again = f"no progress: 2 attempts in a row ended without a step after step {last}"
    return max(steps(run)) == last and again in said and f"each ended in step {last + 1}" in said


def test_the_limit_of_the_container_is_told() -> None:
    told = decode_kill(KILLED, {"/c": 1}, {"/c": 2}, limit=3 * 10**9).render()
    assert "rose from 1 to 2 in the last 10 s, and its processes may take 3.0 GB together; lower" in told
    system = str(memory_kill.SYSTEM)
    assert "together" not in decode_kill(KILLED, {system: 1}, {system: 2}, limit=3 * 10**9).render()
