"""What a host that waits tells, once, and what ends its wait."""

import signal
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.surviving.hosts.ending import Ending
from allranks.surviving.hosts.presence import Presence
from allranks.surviving.hosts.spares import own_words
from allranks.surviving.hosts.state import StateReader
from allranks.surviving.hosts.table import key_of
from allranks.surviving.hosts.waiting import Waiting
from allranks.surviving.interrupts import Interrupts

A, B = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0)


class Board:
    """The notices."""

    def __init__(self) -> None:
        self.up: dict[str, Any] = {}
        self.reads = 0

    def read(self, key: str) -> Any:
        self.reads += 1
        return self.up.get(key)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def make(heard: list[str]) -> tuple[Waiting, Presence, Any]:
    presence = Presence(8.0, StateReader(lambda: 0.0))
    presence.state.participants = {A: 0}
    found = Waiting(B, 3, GuardConfig(), heard.append)
    found.begin()
    return found, presence, Board()


def test_for_whom_it_waits_is_told_once_after_some_seconds(clock: list[float]) -> None:
    heard: list[str] = []
    waits, presence, board = make(heard)
    waits.look(presence, board)
    assert heard == []
    for _ in range(2):
        clock[0] += 6.0
        waits.look(presence, board)
    assert heard == ["1 of 3 hosts are here (b): waiting up to 600 s (guard.join_seconds)"] and board.reads == 0


def test_a_spare_is_told_that_it_is_one_when_the_leader_has_said_so(clock: list[float]) -> None:
    heard: list[str] = []
    waits, presence, board = make(heard)
    presence.state.complete, presence.state.round = True, 7
    for _ in range(20):
        clock[0] += 1.0
        waits.look(presence, board)
    assert heard == [] and 1 < board.reads < 5, "it does not ask at every look"
    board.up["spares/7"] = {"workers": 2, "hosts": [key_of(B)]}
    for _ in range(20):
        clock[0] += 1.0
        waits.look(presence, board)
    assert heard == [own_words(2)]
    waits.is_spare(2)
    presence.state.complete = False
    waits.look(presence, board)
    assert heard == [own_words(2)], "the next round begins in a moment"
    waits.is_spare(4)
    assert heard == [own_words(2), own_words(4)]


def test_who_has_no_room_reads_nothing(clock: list[float]) -> None:
    heard: list[str] = []
    waits, presence, board = make(heard)
    presence.state.complete, presence.state.redundancy_list = True, {B}
    clock[0] += 6.0
    waits.look(presence, board)
    assert heard == ["all 3 places are taken: this host waits until one is free"] and board.reads == 0


def test_the_end_of_the_run_and_a_request_to_stop_end_it() -> None:
    waits, presence, board = make([])
    assert waits.asked_ending() is None and not waits.is_asked_to_stop
    presence.state.closed = True
    with pytest.raises(RendezvousGracefulExitError):
        waits.look(presence, board)
    presence.state.closed, waits.interrupts = False, Interrupts(lambda: None)
    waits.look(presence, board)
    for number, code in ((signal.SIGTERM, 76), (signal.SIGINT, 130)):
        waits.interrupts.first = number
        assert waits.asked_ending() == Ending(code)
        with pytest.raises(RendezvousGracefulExitError):
            waits.look(presence, board)
    waits.since = None
    waits.look(presence, board)


def test_too_few_hosts_are_told_once() -> None:
    heard: list[str] = []
    waits, _, _ = make(heard)
    waits.is_short("the layout does not take 1 worker(s)")
    waits.is_short("the layout does not take 1 worker(s)")
    assert heard == ["the layout does not take 1 worker(s): waiting up to 600 s for more (guard.join_seconds)"]
