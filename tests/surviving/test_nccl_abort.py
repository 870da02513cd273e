"""What NCCL's watchdog has said of a worker that it ended: its words as torch 2.13 prints them."""

import signal
from pathlib import Path

import pytest

from allranks.failure import RAISED, TRANSIENT, log_file
from allranks.surviving.nccl_abort import LAST_BYTES, NcclAborts
from allranks.surviving.outcome import Ended, conclude

TIMEOUT = (
    "[rank1]:[E1127 10:00:00.1 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=10, NumelOut=10, Timeout(ms)=1860000) ran for 1860042 milliseconds "
    "before timing out.\n"
)
ENDED = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
LOST = f"{ENDED}NCCL error: remote process exited or there was a network error, NCCL version 2.27\nncclRemoteError: x\n"
DEVICE = f"{ENDED}CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later\n"
STUCK = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued\n"
MONITOR = (
    "[rank1]:[F1127 10:00:00.1 ProcessGroupNCCL.cpp:1653] [Rank 1] Terminating the process after attempting to dump "
    "debug info, due to collective timeout or exception.\n"
)


def aborted(rank: int = 1, code: int = -signal.SIGABRT) -> Ended:
    return Ended(rank, 100 + rank, code, 10.0 + rank)


@pytest.mark.parametrize(
    ("said", "told", "code", "consequence"),
    [
        (TIMEOUT + ENDED, "OpType=ALLREDUCE, NumelIn=10, NumelOut=10, Timeout(ms)=1860000) waited", TRANSIENT, True),
        (LOST, "NCCL's watchdog: NCCL error: remote process exited", TRANSIENT, True),
        (DEVICE, "NCCL's watchdog: CUDA error: an illegal memory access was encountered", RAISED, False),
        (STUCK, "for 480 s Python's lock was held, or CUDA hung", TRANSIENT, False),
        (STUCK + MONITOR, "for 480 s Python's lock was held, or CUDA hung", TRANSIENT, False),
        (MONITOR, "ended by NCCL's monitor: collective timeout or exception", TRANSIENT, True),
    ],
)
def test_its_last_words_tell_why(tmp_path: Path, said: str, told: str, code: int, consequence: bool) -> None:
    aborts = NcclAborts(tmp_path, [0, 1])
    log_file(tmp_path, 1).write_text("step 1\n" + said + "#0 frames of C++\n" * 100)
    (failure,) = aborts.decode([aborted()])
    assert told in failure.render() and failure.signal == "SIGABRT"
    assert (failure.rank, failure.pid, failure.exit_code, failure.consequence) == (1, 101, code, consequence)


def test_what_was_said_before_it_began_or_of_another_end_is_not_its(tmp_path: Path) -> None:
    log_file(tmp_path, 1).write_text(TIMEOUT)
    aborts = NcclAborts(tmp_path, [1])
    assert aborts.decode([aborted()]) == []
    with log_file(tmp_path, 1).open("a") as log:
        log.write("what(): another assertion\n")
    assert aborts.decode([aborted()]) == []
    with log_file(tmp_path, 1).open("a") as log:
        log.write(LOST)
    assert aborts.decode([aborted(code=-signal.SIGSEGV), aborted(code=1)]) == []
    assert len(aborts.decode([aborted()])) == 1
    with log_file(tmp_path, 1).open("a") as log:
        log.write("." * LAST_BYTES)
    assert aborts.decode([aborted()]) == []


def test_rank_0_whose_words_are_on_the_terminal_follows_the_others(tmp_path: Path) -> None:
    aborts = NcclAborts(tmp_path, [0, 1])
    log_file(tmp_path, 1).write_text(TIMEOUT)
    assert aborts.decode([aborted(0)]) == []
    first, second = aborts.decode([aborted(0), aborted(1)])
    assert "as other ranks were by NCCL's watchdog" in first.message and first.consequence
    killed = Ended(2, 102, -signal.SIGKILL, 9.0)
    outcome = conclude([aborted(0), aborted(1), killed], [first, second], None, {})
    assert outcome.first_failure is not None and outcome.first_failure.rank == 2, "the cause is the one that was killed"
    assert aborts.decode([killed]) == []
