"""A limit of the system under the real command: no more inodes, or no more bytes. Descriptors: test_open_files.py."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from allranks.run import Run
from tests.commands import POINTS, allranks, steps

FEW = ("train.global_batch=8", "--nproc", "2", "--layout", "ddp", "--device", "cpu")

pytestmark = [pytest.mark.full, pytest.mark.distributed]


@contextlib.contextmanager
def mounted(folder: Path, limits: str) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", limits, "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with room for bytes and for few files."""
    with mounted(tmp_path / "few", "size=50m,nr_inodes=20") as folder:
        yield folder


@pytest.fixture
def few_bytes(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with room for a few megabytes."""
    with mounted(tmp_path / "few", "size=8m") as folder:
        yield folder


def fill_for_a_while(folder: Path, run: Path) -> None:
    """Once the run has made some steps, leave its disk no byte for as long as some hundred more take."""
    while len(steps(run)) < 10:
        time.sleep(0.05)
    ballast = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(ballast, bytes(4096))
    time.sleep(4.0)
    os.close(ballast)
    (folder / "ballast").unlink()


def test_a_disk_that_is_full_for_a_while_ends_nothing_and_no_step_is_missing(few_bytes: Path, tmp_path: Path) -> None:
    filling = threading.Thread(target=fill_for_a_while, args=(few_bytes, few_bytes / "run"), daemon=True)
    filling.start()
    words = (*FEW, "checkpoint.every=1000", "train.steps=400", "task.pause=0.02", "--run", "few/run")
    ran = allranks("train", POINTS, *words, folder=tmp_path)
    filling.join()
    run = Run.open(few_bytes / "run")
    assert run.attempts == 1 and list(steps(run.path)) == list(range(1, 401))
    (told,) = [event for event in run.events() if event.get("kind") == "journal"]
    assert told["what"].endswith("its lines were held back, and none is lost")
    warned = [line for line in (ran.stdout + ran.stderr).splitlines() if "No space left on device" in line]
    assert len(warned) == 2 and "/journal/" in "".join(warned) and "/tensorboard/" in "".join(warned)
    board = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0}).Reload()
    assert [point.step for point in board.Scalars("train/loss")] == list(range(1, 401))


def test_a_disk_without_inodes_is_told_of_as_one_and_the_last_good_checkpoint_stays(
    few_inodes: Path, tmp_path: Path
) -> None:
    ran = allranks(
        "train", POINTS, *FEW, "checkpoint.every=2", "train.steps=16", "--run", "few/run", folder=tmp_path, check=78
    )
    told_of = [line for line in ran.stderr.splitlines() if "this is failed save 3 in a row" in line]
    assert told_of and all("No space left on device (" in line and "make room" in line for line in told_of)
    assert all("no more files fit there, `df -i` tells; " in line for line in told_of)
    told = [event for event in Run.open(few_inodes / "run").events() if event["event"] == "verdict"]
    assert {event["kind"] for event in told} == {"checkpoint"} and len(told) == 2, "checkpoint.failures=2 are borne"
