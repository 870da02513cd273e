"""Processes that NCCL aborts, over an error of the device or a wait in vain: whole runs in real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from allranks.failure import read_failures
from allranks.reporting.explain import explain
from allranks.run import Run
from allranks.verdict import Verdict
from tests.commands import LIMIT_SECONDS, PROGRAMS, allranks, environment

SAID = "RuntimeError: CUDA error: device-side assert triggered"
PROGRAM = PROGRAMS / "aborted.py"
WAITED = "NCCL waited in vain in ALLREDUCE (number {}, 4096 values)"


@pytest.mark.sample(2)
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


@pytest.mark.full
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


def explain_attempts(folder: Path, *attempts: str, code: int) -> dict[str, Verdict]:
    """What `explain` says of a run of four ranks that do this in each attempt (programs/in_vain.py), by kind.

    Args:
        code: what the run has to end with.
    """
    told = ("--nproc", "4", "--run", "run", f"task.attempts={'-'.join(attempts)}")
    settings = ("train.steps=9", "train.global_batch=8", f"guard.restarts={len(attempts) - 1}")
    allranks("train", f"{PROGRAMS / 'in_vain.py'}:InVain", *settings, *told, folder=folder, check=code)
    run = Run.open(folder / "run")
    assert run.attempts == len(attempts)
    return {one.kind: one for one in explain(run.path)}


@pytest.mark.full
def test_of_a_wait_in_vain_the_newest_attempt_is_compared_and_nobody_accused_who_was_ended(tmp_path: Path) -> None:
    """The agent kills ranks 0 and 3 at the first abort: where they were, their logs do not say."""
    found = explain_attempts(tmp_path, "wwww", "swws", code=93)
    assert found["E1"].what == f"{WAITED.format(42)}: ranks 1, 2 alike; the logs here have no such wait of ranks 0, 3"
    assert found["E1"].next.startswith("look first at what ranks 0, 3 last did (rank 0 prints to the terminal)")
    line = int(found["E1"].evidence[0].split(":")[1])
    assert "SeqNum=42" in Run.open(tmp_path / "run").log(1).read_text().splitlines()[line - 1]


@pytest.mark.full
def test_of_an_error_after_a_wait_in_vain_the_error_alone_is_told(tmp_path: Path) -> None:
    found = explain_attempts(tmp_path, "wwww", "ssfs", code=1)
    assert found["crash"].what.endswith("ValueError: the user's own mistake") and "rank 2" in found["crash"].what
    assert "E1" not in found


@pytest.mark.full
def test_who_has_failed_did_not_come(tmp_path: Path) -> None:
    """Also behind the last one that waits; rank 0 is not accused, whose words are on the terminal."""
    found = explain_attempts(tmp_path, "wwwf", code=1)
    assert found["E1"].what == f"{WAITED.format(41)}: rank 3 did not come"
