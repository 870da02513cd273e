"""How a run ended, from how each worker did."""

import signal
from dataclasses import replace

import pytest

from allranks.failure import Failure
from allranks.surviving.outcome import UNKNOWN_CODE, Ended, Outcome, conclude, conclude_left

INT, TERM = signal.SIGINT, signal.SIGTERM
RAISED = Failure(1, "host", 101, 5.0, 1, "ValueError: no", traceback="...")
LOST = Failure(0, "host", 100, 4.0, 76, "Connection closed by peer", traceback="...", consequence=True)
REFUSED = Failure(0, "host", 100, 4.5, 78, "no Task")


def ends(*codes: int, killed: tuple[int, ...] = (), unfinished: tuple[int, ...] = ()) -> list[Ended]:
    return [
        Ended(rank, 100 + rank, code, 10.0 + rank, rank in killed, rank not in unfinished, 5)
        for rank, code in enumerate(codes)
    ]


@pytest.mark.parametrize(
    ("ended", "records", "stop", "code", "first_rank"),
    [
        (ends(0, 0), [], None, 0, None),
        (ends(76, 1), [LOST, RAISED], None, 1, 1),
        (ends(78, 1), [REFUSED, RAISED], None, 78, 0),
        (ends(76, 0), [LOST], None, 76, 0),
        (ends(76, -9), [LOST], None, 76, 1),  # killed from outside: the cause, though seen later
        (ends(76, -11), [LOST], None, 1, 1),
        (ends(-9, 1, killed=(0,)), [RAISED], None, 1, 1),
        (ends(0, 3), [], None, 1, 1),
        (ends(130, 130), [], INT, 130, None),
        (ends(75, 75), [], TERM, 75, None),
        (ends(130, 1), [RAISED], INT, 1, 1),  # saving failed
        (ends(-9, -9, killed=(0, 1)), [], INT, 130, None),  # the second Ctrl-C
        (ends(-9, -9, killed=(0, 1)), [], TERM, 76, None),  # the grace is over: not saved
        (ends(75, -9, killed=(1,)), [], TERM, 75, None),
        (ends(-15, -15), [], TERM, 76, None),  # before they could handle it
        (ends(-10, -10), [], TERM, 76, None),  # SIGUSR1, which every process got
        (ends(76, -15), [LOST], TERM, 76, None),
        (ends(UNKNOWN_CODE, UNKNOWN_CODE), [], None, 76, 0),  # the fork server was killed
        (ends(0, 255), [], None, 1, 1),  # a library's exit(-1)
        (ends(0, 0, unfinished=(0, 1)), [], None, 1, 0),  # os._exit(0) at step 5
        (ends(76, 0, unfinished=(0, 1)), [LOST], None, 1, 1),  # it is the cause, though the other one complains
        (ends(75, 75, unfinished=(0, 1)), [], None, 1, 0),  # nobody has saved
        (ends(75, 75, unfinished=(0, 1)), [], TERM, 1, 0),
        (ends(130, 130, unfinished=(0, 1)), [], INT, 130, None),  # workers that the second Ctrl-C has met
        (ends(75, 130, unfinished=(1,)), [], TERM, 75, None),
        (ends(0, 0), [], INT, 0, None),  # it had finished anyway
        (ends(0, -15), [], None, 76, 1),  # somebody else's SIGTERM
    ],
)
def test_the_run_ends_as_its_first_failure_or_its_agreed_stop(
    ended: list[Ended], records: list[Failure], stop: signal.Signals | None, code: int, first_rank: int | None
) -> None:
    outcome = conclude(ended, records, stop, {})
    assert outcome.exit_code == code
    assert (None if outcome.first_failure is None else outcome.first_failure.rank) == first_rank


@pytest.mark.parametrize(
    ("ended", "said", "stop", "code", "failed"),
    [
        (ends(-9, killed=(0,)), (75,), TERM, 75, False),  # the grace ended while it brought a checkpoint to a mirror
        (ends(-9), (75,), TERM, 75, False),  # a scheduler kills everything
        (ends(-9), (75,), None, 75, False),  # train.max_seconds had ended it
        (ends(-9, killed=(0,)), (130,), INT, 130, False),  # the second Ctrl-C
        (ends(-9, 0, killed=(0,)), (0, 0), TERM, 75, False),  # all steps are done and saved, and the mirror has not all
        (ends(-9, 0, killed=(0,)), (0, 0), INT, 130, False),
        (ends(-9, 0), (0, 0), None, 76, True),  # a restart brings it
        (ends(-9, killed=(0,)), (None,), TERM, 76, False),
        (ends(-11), (75,), TERM, 1, True),
        (ends(-9, 1, killed=(0,)), (75, None), TERM, 1, True),
    ],
)
def test_who_is_killed_when_all_was_saved_has_stopped(
    ended: list[Ended], said: tuple[int | None, ...], stop: signal.Signals | None, code: int, failed: bool
) -> None:
    told = [replace(one, said=word) for one, word in zip(ended, said, strict=True)]
    outcome = conclude(told, [RAISED] if ended[-1].code == 1 else [], stop, {})
    assert outcome.exit_code == code and (outcome.first_failure is not None) == failed


def test_a_record_of_another_process_does_not_count() -> None:
    stale = replace(RAISED, pid=7)
    assert conclude(ends(0, 0), [stale], None, {}).exit_code == 0


NOTED = replace(RAISED, noted=True)
NOTED_LOSS = replace(LOST, rank=1, pid=101, noted=True)
HUNG = replace(RAISED, time=300.0, exit_code=93, message="no progress", traceback="", hung=True)


@pytest.mark.parametrize(
    ("ended", "records", "stop", "code", "message"),
    [
        (ends(0, -6), [NOTED], None, 1, "ValueError: no"),  # NCCL's watchdog, while it was closing
        (ends(0, -11), [NOTED], None, 1, "ValueError: no"),
        (ends(0, -9), [NOTED], None, 1, "ValueError: no"),  # a restart would meet it again
        (ends(0, UNKNOWN_CODE), [NOTED], None, 1, "ValueError: no"),
        (ends(0, -9, killed=(1,)), [NOTED], None, 1, "ValueError: no"),  # it closed for too long
        (ends(0, -9, killed=(1,)), [NOTED, HUNG], None, 1, "ValueError: no"),  # or without end
        (ends(0, -9, killed=(1,)), [NOTED_LOSS, HUNG], None, 93, "no progress"),
        (ends(0, 3), [NOTED], None, 1, "ValueError: no"),
        (ends(130, -9, killed=(1,)), [NOTED], INT, 1, "ValueError: no"),
        (ends(0, 0), [NOTED], None, 0, None),  # it was caught, and the worker came to its end
        (ends(75, 75), [NOTED], TERM, 75, None),
        (ends(0, -6), [NOTED_LOSS], None, 76, "Connection closed by peer"),  # the watchdog of who has lost a peer
        (ends(0, -9), [NOTED_LOSS], None, 76, "was killed by SIGKILL"),  # which does not follow from that
        (ends(0, -9, killed=(1,)), [NOTED_LOSS], None, 0, None),
        (ends(-11, -6), [NOTED_LOSS], None, 1, "was killed by SIGSEGV"),
        (ends(0, -6), [replace(NOTED, pid=7)], None, 1, "was killed by SIGABRT"),  # of another process
    ],
)
def test_what_a_worker_has_noted_is_the_cause_of_what_ended_it_then(
    ended: list[Ended], records: list[Failure], stop: signal.Signals | None, code: int, message: str | None
) -> None:
    outcome = conclude(ended, records, stop, {})
    first = outcome.first_failure
    assert outcome.exit_code == code and (first is None) == (message is None)
    assert first is None or first.message.startswith(message or "")


def test_an_end_before_the_end_is_told_with_its_step() -> None:
    failure = conclude(ends(0, 0, unfinished=(1,)), [], None, {}).first_failure
    assert failure is not None
    assert failure.message.startswith("ended with exit code 0 after step 5, its work neither done nor saved")


def test_a_worker_that_cannot_be_killed_ends_the_run_on_this_host() -> None:
    left = Failure(1, "host", 101, 9.0, 76, "pid 101 does not end, though it was killed: state D")
    hung = replace(RAISED, hung=True, exit_code=93, traceback="", message="no progress for 15 s")
    assert conclude_left(Outcome(0), left) == Outcome(76, left)
    assert conclude_left(Outcome(75), left) == Outcome(75), "all have saved"
    found = conclude_left(Outcome(93, hung), left)
    assert found.exit_code == 76 and found.first_failure is not None
    assert found.first_failure.render().splitlines()[1:] == [left.brief()]
    assert conclude_left(Outcome(1, RAISED), left).exit_code == 1, "no restart helps"


def test_replies_are_kept() -> None:
    assert conclude(ends(0), [], None, {0: b"x"}).replies == {0: b"x"}
