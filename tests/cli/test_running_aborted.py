"""An error of the device, whose process NCCL aborts while it closes: whole runs in real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.failure import read_failures
from allranks.run import Run
from tests.commands import LIMIT_SECONDS, PROGRAMS, allranks, environment

SAID = "RuntimeError: CUDA error: device-side assert triggered"
PROGRAM = PROGRAMS / "aborted.py"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_ends_the_run_and_not_the_signal_that_came_before_all_was_closed(
    tmp_path: Path, workers: int
) -> None:
    settings = ("train.steps=9", "train.global_batch=10", f"data.workers={workers}", "--nproc", "2")
    ran = allranks("train", f"{PROGRAM}:Aborted", *settings, "--run", "run", folder=tmp_path, check=1)
    assert ran.stderr.splitlines()[-1] == SAID and "in fail_on_the_device" in ran.stderr
    assert "SIGABRT" not in ran.stderr
    run = Run.open(tmp_path / "run")
    assert run.attempts == 1 and not [event for event in run.events() if event.get("kind") == "restart"]
    (failure,) = (one for one in read_failures(run.log().parent) if not one.consequence)
    assert failure.rank == 1 and failure.noted


def test_a_loop_of_ones_own_raises_the_error_too(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(PROGRAM)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert ran.returncode == 1 and ran.stderr.splitlines()[-1] == SAID
    assert "in own_loop" in ran.stderr and "SIGABRT" not in ran.stderr
