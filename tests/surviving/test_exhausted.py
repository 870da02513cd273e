"""A limit of the system under the real command: no more inodes. Descriptors: test_open_files.py."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from allranks.run import Run
from tests.commands import POINTS, allranks

FEW = ("train.global_batch=8", "checkpoint.every=2", "--nproc", "2", "--layout", "ddp", "--device", "cpu")

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
    told_of = [line for line in ran.stderr.splitlines() if "this is failed save 3 in a row" in line]
    assert told_of and all("No space left on device (" in line and "make room" in line for line in told_of)
    assert all("no more files fit there, `df -i` tells; " in line for line in told_of)
    told = [event for event in Run.open(few_inodes / "run").events() if event["event"] == "verdict"]
    assert {event["kind"] for event in told} == {"checkpoint"} and len(told) == 2, "checkpoint.failures=2 are borne"
