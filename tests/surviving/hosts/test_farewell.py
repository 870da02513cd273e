"""Who leaves last."""

import time
from datetime import UTC, datetime

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.farewell import farewell_seconds, is_last
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.state import StateReader
from allranks.surviving.interrupts import Interrupts
from allranks.surviving.workers import KILL_SECONDS, LEAVING_SECONDS

A, B = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0)


def test_who_has_left_or_is_silent_is_not_waited_for() -> None:
    meeting = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
    board, presence = Notices(meeting, Seal(b"0123456789abcdef")), Presence(8.0, StateReader(time.monotonic))
    assert is_last([A, B], presence, board, 0.0), "nobody lives"
    presence.state.last_heartbeats = {A: datetime.now(UTC), B: datetime.now(UTC)}
    assert not is_last([A, B], presence, board, 0.1)
    board.say_goodbye(A)
    assert not is_last([A, B], presence, board, 0.0) and is_last([A], presence, board, 0.0)
    board.say_goodbye(B)
    assert is_last([A, B], presence, board, 0.0)


def test_who_leads_stays_longer_than_any_host_ends_its_workers_unless_it_is_asked_twice() -> None:
    asked = Interrupts(lambda: None)
    for interrupts in (None, asked):
        assert farewell_seconds(interrupts, leads=True) > KILL_SECONDS + LEAVING_SECONDS
        assert farewell_seconds(interrupts, leads=False) == 0.0
    asked.urgent = True
    assert farewell_seconds(asked, leads=True) <= KILL_SECONDS
