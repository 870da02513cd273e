"""A disk that refuses calls of the real command: EIO, a quota, a full or read-only disk, a stale handle; by strace."""

import shutil
import subprocess
from pathlib import Path

import pytest

from allranks.checkpointing.checkpoint import Checkpoint, verify_files
from allranks.run import Run
from tests.commands import PROGRAMS, allranks, steps

REFUSED = str(PROGRAMS / "refused.py")
FAULTS = {
    "1:fsync:EIO": "Input/output error",
    "1:fsync:EDQUOT": "Disk quota exceeded",
    "1:fsync:ESTALE": "Stale file handle",
    "0:fsync:EIO": "Input/output error",
    "0:fsync:ENOSPC:2": "No space left on device",  # its own part is on the disk, the manifest is not
    "0:rename+renameat+renameat2:EROFS": "Read-only file system",
}
"""What happens in one save after the other -> the system's words."""


def cannot_trace() -> str:
    """Why strace cannot make calls fail here; "" where it can."""
    if shutil.which("strace") is None:
        return "there is no strace here (Debian: strace)"
    tried = ["strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true"]
    ran = subprocess.run(tried, capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else f"strace cannot trace here: {ran.stderr.strip()}"


@pytest.mark.full
@pytest.mark.distributed
def test_what_the_system_refuses_in_a_save_is_told_and_borne_and_the_next_save_is_whole(tmp_path: Path) -> None:
    if reason := cannot_trace():
        pytest.skip(reason)
    every = 2 * (len(FAULTS) + 2)
    settings = (f"train.steps={every}", "train.global_batch=8", "checkpoint.every=2", "checkpoint.failures=10")
    where = ("--nproc", "2", "--layout", "ddp", "--run", "run", f"task.faults={','.join(FAULTS)}")
    ran = allranks("train", REFUSED, *settings, *where, folder=tmp_path)
    run = Run.open(tmp_path / "run")
    assert list(steps(run.path)) == list(range(1, every + 1)) and run.attempts == 1, ran.stderr
    told = [event for event in run.events() if event["event"] == "verdict"]
    assert [event["kind"] for event in told] == ["checkpoint"] * len(FAULTS), ran.stderr
    for number, (event, (fault, words)) in enumerate(zip(told, FAULTS.items(), strict=True), start=2):
        what = str(event["what"])
        assert f"step-{2 * number:08d}" in what and "was not saved" in what and words in what, (fault, what)
        assert f"rank {fault[0]}: " in what and "\n" not in what and str(tmp_path) in what
        assert "the newest stays that of step 2" in event["evidence"][0]
    kept = sorted(path.name for path in run.checkpoints.iterdir() if not path.name.startswith("."))
    assert kept == ["step-00000002", f"step-{every:08d}"]
    for name in kept:
        verify_files(Checkpoint.open(run.checkpoints / name))
