"""`checkpoint.memory_every`: whoever is killed, the run goes on from memory, bit by bit, and nothing stays there."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, list_checkpoints, verify_files
from allranks.checkpointing.host_memory import SHARED_MEMORY, HostMemory
from allranks.run import Run
from tests.commands import POINTS, alive, allranks, running, tensor_digests, wait_for, worker_pids
from tests.training.runs import flip_a_byte

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
SETTINGS = (
    *("train.steps=40", "train.global_batch=10", "optimizer.lr=0.05", "checkpoint.every=15", "checkpoint.keep=9"),
    *("track.tensorboard=false", "--layout", "ddp", "--nproc", "2"),
)
COPIES = ("checkpoint.memory_every=1", "task.pause=0.08")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests at the end of the run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    allranks("train", POINTS, *SETTINGS, "--run", "run", folder=folder)
    return tensor_digests(folder / "run", 40)


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in Run.open(run).events() if event["event"] == kind]


def copied(run: Path) -> int:
    """The newest step that is in memory, as the journal has it."""
    if not (run / "run.json").is_file():
        return 0
    return max((event["step"] for event in events(run, "checkpoint") if event.get("tier") == "memory"), default=0)


def memory_of(run: Path) -> Path:
    return HostMemory(Run.open(run).id).directory


def wait_for_copy(run: Path, step: int, command: "subprocess.Popen[str]") -> None:
    wait_for(lambda: copied(run) >= step or command.poll() is not None, f"step {step} in memory")


def kill(run: Path, command: "subprocess.Popen[str]") -> tuple[Path, str]:
    """Kill the command; the newest copy that it leaves, and the name of the newest that the disk has."""
    command.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(alive, worker_pids(run))), "the end of the workers", seconds=10.0)
    newest, *older = list_checkpoints(memory_of(run))
    assert len(older) <= 1, "the one whose place it was about to take"
    return newest, list_checkpoints(run / "checkpoints")[0].name


@contextmanager
def cleared(run: Path) -> Iterator[None]:
    """What a test that fails has left in memory goes."""
    try:
        yield
    finally:
        if (run / "run.json").is_file():
            shutil.rmtree(memory_of(run), ignore_errors=True)


@pytest.mark.full
def test_killed_workers_and_a_killed_command_go_on_from_memory(tmp_path: Path, whole: dict[str, str]) -> None:
    run = tmp_path / "run"
    living, dead = HostMemory(os.urandom(8).hex()), HostMemory(os.urandom(8).hex())
    dead.open()
    dead.release()
    living.open()
    with cleared(run):
        with running("train", POINTS, *SETTINGS, *COPIES, "--run", "run", folder=tmp_path) as command:
            wait_for_copy(run, 17, command)
            os.kill(worker_pids(run)[1], signal.SIGKILL)
            wait_for(lambda: events(run, "resume") or command.poll() is not None, "a second attempt")
            (resumed,) = events(run, "resume")
            assert resumed["tier"] == "memory" and 17 <= resumed["step"] < 40
            wait_for_copy(run, resumed["step"] + 2, command)
            newest, saved = kill(run, command)
        assert newest.name > max(saved, resumed["path"])
        ran = allranks("train", "--resume", "run", "task.pause=0", "--change", "task.pause", folder=tmp_path)
        assert not memory_of(run).exists(), "the run has ended"
    assert not dead.directory.exists() and living.directory.is_dir(), "what nobody supervises, and that alone"
    living.close()
    last = events(run, "resume")[-1]
    assert (last["path"], last["tier"]) == (newest.name, "memory")
    assert f"from {newest.name} in the memory of this host: the disk has {saved}" in ran.stdout + ran.stderr
    assert tensor_digests(run, 40) == whole


@pytest.mark.full
def test_a_damaged_copy_is_passed_over_loudly(tmp_path: Path, whole: dict[str, str]) -> None:
    run = tmp_path / "run"
    with cleared(run):
        with running("train", POINTS, *SETTINGS, *COPIES, "--run", "run", folder=tmp_path) as command:
            wait_for_copy(run, 17, command)
            newest, saved = kill(run, command)
        flip_a_byte(newest)
        # A kill between a copy's commit and the removal of the one before it leaves both: the older is whole.
        older = [(one.name, "memory") for one in list_checkpoints(memory_of(run))[1:]]
        ran = allranks("train", "--resume", "run", "task.pause=0", "--change", "task.pause", folder=tmp_path)
        assert not memory_of(run).exists()
    (resumed,) = events(run, "resume")
    assert (resumed["path"], resumed["tier"]) == next(iter(older), (saved, "disk"))
    assert f"passed over a newer checkpoint: {newest}" in ran.stdout + ran.stderr
    assert tensor_digests(run, 40) == whole


@pytest.mark.full
def test_an_error_that_ends_the_run_loses_no_step_of_memory(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", ("checkpoint.every=1000", "checkpoint.memory_every=1", "task.boom_rank=0")
    with cleared(run):
        words = (*SETTINGS[:-4], *alone, "--layout", "single", "--run", "run")
        ran = allranks("train", POINTS, *words, folder=tmp_path, check=1)
        assert not memory_of(run).exists()
    assert ran.stderr.strip().endswith("ValueError: the user's own mistake")
    last = f"step-{copied(run):08d}"
    assert f"{last}, which was in the memory of this host alone, is on the disk now" in ran.stderr
    (kept,) = list_checkpoints(run / "checkpoints")
    assert kept.name == last
    verify_files(Checkpoint.open(kept, Run.open(run).id))
