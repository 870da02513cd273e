"""Limits of the system under the real command: one clear line each. Descriptors: test_open_files.py."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.run import Run
from tests.commands import POINTS, allranks

FEW = ("train.global_batch=8", "checkpoint.every=2", "--nproc", "2", "--layout", "ddp", "--device", "cpu")
PIDS = Path("/sys/fs/cgroup/pids")

pytestmark = [pytest.mark.full, pytest.mark.distributed]


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system with room for bytes and for few files."""
    folder = tmp_path / "few"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=50m,nr_inodes=20", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs here (needs root)")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_without_inodes_is_told_of_as_one_and_the_last_good_checkpoint_stays(
    few_inodes: Path, tmp_path: Path
) -> None:
    ran = allranks("train", POINTS, *FEW, "train.steps=16", "--run", "few/run", folder=tmp_path, check=78)
    last = ran.stderr.splitlines()[-1]
    assert "No space left on device (no more files fit there, `df -i` tells; " in last and "make room" in last
    told = [event for event in Run.open(few_inodes / "run").events() if event["event"] == "verdict"]
    assert {event["kind"] for event in told} == {"checkpoint"} and len(told) == 2, "checkpoint.failures=2 are borne"


@pytest.fixture
def few_threads() -> Iterator[tuple[str, ...]]:
    """A command before a command, which may then have so many threads and processes in all."""
    folder = PIDS / f"allranks-test-{uuid.uuid4().hex[:8]}"
    if not os.access(PIDS, os.W_OK) or shutil.which("sh") is None:
        pytest.skip("no control group for pids (version 1) can be made here (needs root)")
    folder.mkdir()
    (folder / "pids.max").write_text("14")
    yield ("sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh")
    folder.rmdir()


def test_a_limit_on_threads_is_named_and_not_the_network(few_threads: tuple[str, ...], tmp_path: Path) -> None:
    settings = ("train.steps=4", "guard.restarts=0", "--run", "run")
    ran = allranks("train", POINTS, *FEW, *settings, folder=tmp_path, check=None, launcher=few_threads)
    assert ran.returncode != 0 and "no more threads may be started here: raise `ulimit -u`" in ran.stderr
