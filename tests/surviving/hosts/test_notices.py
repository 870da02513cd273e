"""What hosts say to each other besides the state."""

from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import Failure
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.ending import Ending, Report
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal, SealError

FAILURE = Failure(1, "b", 9, 2.5, 76, "lost")


@pytest.fixture
def meeting() -> MeetingStore:
    return MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)


def test_reports_are_of_a_round_and_a_place(meeting: MeetingStore) -> None:
    board = Notices(meeting, Seal(b"0123456789abcdef"))
    board.report(3, 1, Report(0))
    assert board.reports(3, 2) == [None, Report(0)] and board.reports(4, 2) == [None, None]
    assert board.has_reported(3, 1) and not board.has_reported(3, 0)
    assert not board.in_trouble(3)
    board.report(3, 0, Report(76, FAILURE))
    assert board.in_trouble(3) and not board.in_trouble(4)
    assert board.reports(3, 2)[0] == Report(76, FAILURE)


def test_a_lost_peer_is_all_that_is_known_until_somebody_knows_more(meeting: MeetingStore) -> None:
    board = Notices(meeting, Seal(b"0123456789abcdef"))
    assert not board.lost_a_peer(3, 2)
    board.report(3, 0, Report(76, replace(FAILURE, consequence=True)))
    assert board.lost_a_peer(3, 2) and not board.lost_a_peer(4, 2)
    board.report(3, 1, Report(76, FAILURE))
    assert not board.lost_a_peer(3, 2)


def test_the_first_ending_holds(meeting: MeetingStore) -> None:
    board = Notices(meeting, Seal(b"0123456789abcdef"))
    assert board.ending() is None
    board.end(Ending(76, FAILURE))
    board.end(Ending(0))
    assert board.ending() == Ending(76, FAILURE)


def test_what_a_stranger_puts_up_is_refused(meeting: MeetingStore) -> None:
    Notices(meeting, Seal(b"another secret 16")).end(Ending(0))
    with pytest.raises(SealError, match="ending"):
        Notices(meeting, Seal(b"0123456789abcdef")).ending()


def test_a_goodbye_is_of_one_host(meeting: MeetingStore) -> None:
    board, (one, other) = Notices(meeting, Seal(b"0123456789abcdef")), (_NodeDesc("a", pid, 0) for pid in (1, 2))
    board.say_goodbye(one)
    assert board.has_left(one) and not board.has_left(other)
