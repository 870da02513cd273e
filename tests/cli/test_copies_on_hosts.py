"""`checkpoint.memory_every` with `--nodes`: whichever host is lost, the run goes on from what the others have of it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import list_checkpoints
from allranks.checkpointing.host_memory import SHARED_MEMORY, left_of, parts_of
from allranks.run import Run
from tests.commands import POINTS, alive, allranks, tensor_digests, wait_for
from tests.hosts import Cluster, Host, cluster

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm"),
]
SETTINGS = ("train.steps=40", "checkpoint.every=15", "checkpoint.memory_every=1", "task.pause=0.1")
LOOKS_SECONDS = 2.0  # after it has counted an attempt a host sees at once what it has in its memory


def events(run: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in Run.open(run).events(rank) if event["event"] == kind]


def copied(run: Path) -> int:
    """The newest step that is in memory, as the journal has it."""
    if not (run / "run.json").is_file():
        return 0
    return max((event["step"] for event in events(run, "checkpoint") if event.get("tier") == "memory"), default=0)


@contextmanager
def two_hosts(folder: Path, *words: str) -> Iterator[tuple[Cluster, Host, Host]]:
    """Two hosts with a copy of step 17 or more in their memory; what a test that fails leaves there goes."""
    with cluster(folder) as found:
        try:
            first = found.start("hosta", *SETTINGS, *words)
            found.wait_until_led()
            second = found.start("hostb", *SETTINGS, *words)
            wait_for(lambda: copied(found.run) >= 17 or first.process.poll() is not None, "step 17 in memory", 100)
            yield found, first, second
        finally:
            found.close()
            if (found.run / "run.json").is_file():
                for path in left_of(Run.open(found.run).id):
                    shutil.rmtree(path, ignore_errors=True)


def lose(run: Path, host: Host) -> None:
    """All of a host goes, its memory too."""
    (own,) = [path for path in parts_of(Run.open(run).id) if _holder(path) == host.process.pid]
    workers = host.family()
    host.kill()
    wait_for(lambda: not any(alive(pid) for pid in workers), "workers that die with their command", 20)
    shutil.rmtree(own)


def _holder(part: Path) -> int:
    return int(json.loads((part / "lease").read_text())["pid"])


def check_end(run: Path, folder: Path) -> None:
    """It ended as the same run of one host does, and left nothing in memory."""
    alone = ("--device", "cpu", "--run", "alone", "--nproc", "2", "--layout", "ddp", "train.steps=40")
    allranks("train", POINTS, *alone, folder=folder)
    assert tensor_digests(run, 40) == tensor_digests(folder / "alone", 40)
    assert left_of(Run.open(run).id) == []


@pytest.mark.full
def test_a_lost_host_takes_no_step_of_memory_along(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (found, first, second):
        lose(found.run, second)
        before = copied(found.run)
        third = found.start("hostc", *SETTINGS)
        assert (first.end(), third.end()) == (0, 0), first.said() + third.said()
        (resumed,) = events(found.run, "resume")
        assert resumed["step"] >= before - 1 >= 16 and resumed["path"] not in ("step-00000015", "step-00000030")
        assert f"{resumed['path']} came to the disk from the memory of {first.name}" in first.said()
        check_end(found.run, tmp_path)


@pytest.mark.full
def test_a_killed_worker_costs_no_step_of_memory(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (found, first, second):
        os.kill(events(found.run, "start", rank=1)[-1]["pid"], signal.SIGKILL)
        assert (first.end(), second.end()) == (0, 0), first.said() + second.said()
        (resumed,) = events(found.run, "resume")
        assert resumed["step"] >= 17
        check_end(found.run, tmp_path)


@pytest.mark.full
def test_what_one_host_alone_has_left_counts_where_no_copies_are_asked_for(tmp_path: Path) -> None:
    """The first has been started anew meanwhile, and so have all commands."""
    with two_hosts(tmp_path) as (found, first, second):
        workers = second.family()
        second.kill()  # before it sees that the other one is lost, and brings to the disk what it has
        lose(found.run, first)
        wait_for(lambda: not any(alive(pid) for pid in workers), "workers that die with their command", 20)
        before = copied(found.run)
        (left,) = parts_of(Run.open(found.run).id)
        hidden = left.rename(left.with_name(f"{found.run.parent.name}-of-the-second"))  # both are on this machine
        words = (*SETTINGS[:2], "checkpoint.memory_every=none", "task.pause=0.1")
        again = [found.start("hosta", *words)]
        wait_for(lambda: Run.open(found.run).attempts > 1, "an attempt that is counted", 100)
        time.sleep(LOOKS_SECONDS)
        hidden.rename(left.with_name(f"{left.name.rpartition('-')[0]}-0"))  # as on a machine of its own
        again.append(found.start("hostb", *words))
        assert [host.end() for host in again] == [0, 0], again[0].said() + again[1].said()
        (resumed,) = events(found.run, "resume")
        assert resumed["step"] >= before - 1 >= 16 and resumed["path"] not in ("step-00000015", "step-00000030")
        check_end(found.run, tmp_path)


@pytest.mark.full
def test_an_error_that_ends_the_run_loses_no_step_of_memory(tmp_path: Path) -> None:
    with two_hosts(tmp_path, "task.boom_rank=1") as (found, first, second):
        assert (first.end(), second.end()) == (1, 1), first.said() + second.said()
        newest = list_checkpoints(found.run / "checkpoints")[0].name
        assert newest == f"step-{copied(found.run):08d}" > "step-00000016"
        assert f"{newest}, which was in the memory of hosts alone, is on the disk now" in first.said() + second.said()
        assert left_of(Run.open(found.run).id) == []
