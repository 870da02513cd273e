"""How a run ended, from how each worker did."""

import signal
from dataclasses import replace

import pytest

from allranks.failure import Failure
from allranks.surviving.outcome import Ended, conclude

INT, TERM = signal.SIGINT, signal.SIGTERM
RAISED = Failure(1, "host", 101, 5.0, 1, "ValueError: no", traceback="...")
LOST = Failure(0, "host", 100, 4.0, 76, "Connection closed by peer", traceback="...", consequence=True)
REFUSED = Failure(0, "host", 100, 4.5, 78, "no Task")


def ends(*codes: int, killed: tuple[int, ...] = ()) -> list[Ended]:
    return [Ended(rank, 100 + rank, code, 10.0 + rank, rank in killed) for rank, code in enumerate(codes)]


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
        (ends(255, 255), [], None, 76, 0),  # the fork server was killed
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


def test_a_record_of_another_process_does_not_count() -> None:
    stale = replace(RAISED, pid=7)
    assert conclude(ends(0, 0), [stale], None, {}).exit_code == 0


def test_replies_are_kept() -> None:
    assert conclude(ends(0), [], None, {0: b"x"}).replies == {0: b"x"}
