"""How an error becomes a record, an exit code, and the first of several."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.errors import CheckpointError, ProcessError, TaskError
from allranks.failure import (
    Failure,
    StoppedBeforeStart,
    clear_failures,
    clear_unfinished,
    describe_error,
    describe_exit,
    describe_signal,
    first_failure,
    read_failures,
    refuses_threads,
)

ROOT_CAUSE = Failure(0, "host", 10, 5.0, 1, "ValueError: no", traceback="Traceback\nValueError: no\n")


class DistNetworkError(RuntimeError):
    """Named as torch's, which this test does not import."""


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "code", "message", "has_traceback", "consequence"),
    [
        (ValueError("wrong\nin two lines"), 1, "in two lines", True, False),
        (TaskError("no Task"), 78, "no Task", False, False),
        (CheckpointError("torn"), 78, "torn", False, False),
        (ProcessError("port 1 is taken"), 76, "port 1 is taken", False, False),
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C", False, False),
        (SystemExit(3), 1, "sys.exit(3)", True, False),
        (SystemExit("bye"), 1, "sys.exit('bye')", True, False),
        (SystemExit(), 1, "sys.exit()", True, False),
        (SystemExit(0), 1, "sys.exit(0)", True, False),
        (SystemExit(75), 1, "sys.exit(75)", True, False),
        (SystemExit(76), 76, "sys.exit(76)", True, False),
        (SystemExit(78), 1, "sys.exit(78)", True, False),  # no refusal of ours
        (SystemExit(93), 1, "sys.exit(93)", True, False),
        (RuntimeError("[gloo] Connection closed by peer [::1]:7"), 76, "closed by peer", True, True),
        (RuntimeError("[gloo] Read error [10.0.0.2]:7: No route to host"), 76, "No route", True, True),
        (RuntimeError("[gloo] Read error [10.0.0.2]:7: Connection timed out"), 76, "timed out", True, True),
        (DistNetworkError("failed to recv, got 0 bytes"), 76, "got 0 bytes", True, True),
        (ConnectionResetError("Connection reset by peer"), 1, "reset by peer", True, False),  # of the user's download
        (RuntimeError("shapes differ"), 1, "shapes differ", True, False),
    ],
)
def test_every_error_has_its_code(
    error: BaseException, code: int, message: str, has_traceback: bool, consequence: bool
) -> None:
    failure = describe_error(raised(error), 3)
    assert (failure.rank, failure.exit_code, failure.consequence) == (3, code, consequence)
    assert message in failure.message
    assert bool(failure.traceback) == has_traceback


def test_an_error_caused_by_a_lost_peer_is_a_consequence() -> None:
    cause = raised(RuntimeError("Connection closed by peer"))
    assert describe_error(_chained(ProcessError("lost a peer"), cause), 0).consequence
    assert not describe_error(_chained(ProcessError("lost a peer"), ValueError("x")), 0).consequence


def _chained(error: BaseException, cause: BaseException) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(("number", "code", "word"), [(signal.SIGKILL, 76, "memory"), (signal.SIGSEGV, 1, "compiled")])
def test_signals_have_names(number: int, code: int, word: str) -> None:
    failure = describe_signal(number, rank=1, pid=5, when=2.0)
    assert failure.signal == signal.Signals(number).name
    assert failure.exit_code == code
    assert word in failure.render()
    assert failure.signal in failure.render()


def test_an_exit_without_a_record() -> None:
    assert describe_exit(255, rank=0, pid=1, when=0.0).exit_code == 1
    assert describe_exit(78, rank=0, pid=1, when=0.0).exit_code == 78
    told = describe_exit(75, rank=0, pid=1, when=0.0, step=5)
    assert told.exit_code == 1 and told.message.startswith("ended with exit code 75 after step 5, its work neither ")
    assert describe_exit(3, rank=0, pid=1, when=0.0).message == "ended with exit code 3, and no word why"


def test_the_first_failure_is_the_earliest_cause() -> None:
    consequence = replace(ROOT_CAUSE, rank=1, time=1.0, consequence=True)
    later = replace(ROOT_CAUSE, rank=2, time=9.0)
    stopped = replace(ROOT_CAUSE, rank=3, time=0.5, exit_code=130)
    assert first_failure([stopped, consequence, later, ROOT_CAUSE]) == ROOT_CAUSE
    assert first_failure([stopped, consequence]) == consequence
    assert first_failure([stopped]) == stopped
    assert first_failure([]) is None


def test_what_a_killed_worker_was_writing_goes_with_its_record(tmp_path: Path) -> None:
    for name in ("failure-00001.77.tmp", "rank-00001.collectives.77.tmp", "failure-00001.json"):
        (tmp_path / name).touch()
    for name in ("rank-00001.log", "rank-00001.collectives.json"):
        (tmp_path / name).touch()
    (tmp_path / "rank-00002.collectives.78.tmp").touch()
    clear_unfinished(tmp_path, [1])
    assert (tmp_path / "failure-00001.json").exists() and (tmp_path / "rank-00002.collectives.78.tmp").exists()
    assert not list(tmp_path.glob("*-00001.*.tmp"))
    clear_failures(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00001.collectives.json", "rank-00001.log"]


def test_records_of_ranks_that_an_attempt_has_no_more_go_with_any_hosts(tmp_path: Path) -> None:
    """The host that wrote them is lost; those of ranks 2 and 3 are another host's, which is there."""
    for rank in range(6):
        replace(ROOT_CAUSE, rank=rank).write(tmp_path)
    clear_failures(tmp_path, [0, 1], num_ranks=4)
    assert [one.rank for one in read_failures(tmp_path)] == [2, 3]


def test_a_record_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    ROOT_CAUSE.write(tmp_path)
    (tmp_path / "failure-00007.json").write_text('{"rank": 7')
    (tmp_path / "failure-00008.json").write_text('{"rank": 8, "unknown": 1}')
    typed = (tmp_path / "failure-00000.json").read_text().replace('"time": ', '"time": "late", "x": ')
    (tmp_path / "failure-00009.json").write_text(typed)
    (tmp_path / "failure-00010.json").write_text("[" * 200_000)
    os.mkfifo(tmp_path / "failure-00011.json")
    assert read_failures(tmp_path) == [ROOT_CAUSE]


def test_who_was_asked_to_stop_too_early_has_made_no_mistake() -> None:
    found = describe_error(StoppedBeforeStart("SIGTERM"), 1)
    assert (found.exit_code, found.message, found.traceback) == (76, "stopped by SIGTERM before the run started", "")


def test_a_bus_error_names_both_of_its_causes() -> None:
    failure = describe_signal(signal.SIGBUS, rank=1, pid=5, when=2.0)
    assert failure.message.startswith("was killed by SIGBUS: ") and failure.exit_code == 1
    assert "a mapped file (of the data) was cut short, or /dev/shm is full" in failure.message


@pytest.mark.parametrize("words", ["Resource temporarily unavailable", "can't start new thread"])
def test_a_thread_that_may_not_be_started_is_told_with_the_limit(words: str) -> None:
    shown = describe_error(RuntimeError(words), 1).render().splitlines()
    assert shown[-1] == f"RuntimeError: {words}" and shown[-2].startswith("allranks: no more threads may be started")
    assert "no more threads" not in describe_error(ValueError(words), 1).render()


def test_another_thing_that_is_unavailable_is_no_thread() -> None:
    assert refuses_threads("thread constructor failed: Resource temporarily unavailable")
    for text in ("ncclSystemError: recv: Resource temporarily unavailable", "mlock: Resource temporarily unavailable"):
        assert not refuses_threads(text)
