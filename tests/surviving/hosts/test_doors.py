"""Hosts of a first round that look whether they reach each other, in threads of one process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.parallel.reachable import open_door
from allranks.surviving.hosts import doors as module
from allranks.surviving.hosts.doors import Ways, look_around, own_address
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.table import Table

MEMBERS = tuple(_NodeDesc(name, 8, 0) for name in "abc")
TABLE = Table(4, MEMBERS, "127.0.0.1", 1234, (1, 2, 1), new=(0, 1, 2), tried=(0, 1, 2))


def board() -> Notices:
    return Notices(MeetingStore(HashStore(), Endpoint("h", 1), "h", serves=True, call_seconds=5), Seal(b"0" * 16))


def together(
    notices: Notices, places: tuple[int, ...] = (0, 1, 2), is_over: Any = lambda: False, table: Table = TABLE
) -> list[Ways | None]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda place: look_around(notices, table, place, is_over, 1.0), places))


def test_hosts_that_reach_each_other_say_nothing() -> None:
    assert together(board()) == [Ways()] * 3


def test_all_hosts_say_the_same_of_a_closed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_closed", lambda others, seconds: {"2": "timed out"} if 2 in others else {})
    told = together(board())
    (ways,) = set(told)
    assert ways is not None and ways.closed.startswith("2 of 6 ways between 3 hosts are closed: ")
    assert ways.refused == {0, 1, 2}, "of a first round nobody can say whose fault it is"


@pytest.mark.parametrize(("closed", "refused"), [({(0, 2)}, {2}), ({(2, 1), (0, 1)}, {2}), ({(0, 1)}, set())])
def test_later_only_who_is_new_is_tried_and_refused(
    monkeypatch: pytest.MonkeyPatch, closed: set[tuple[int, int]], refused: set[int]
) -> None:
    tried = list[tuple[int, ...]]()

    def find(here: int, others: dict[int, Any]) -> dict[str, str]:
        tried.append((here, *others))
        return {str(there): "timed out" for there in others if (here, there) in closed}

    monkeypatch.setattr(module, "own_address", lambda table, place: f"127.0.0.{place + 1}")
    real = open_door
    places = dict[str, int]()

    def open_here(address: str) -> Any:
        places[str(threading.get_ident())] = int(address[-1]) - 1
        return real(address)

    monkeypatch.setattr(module, "open_door", open_here)
    monkeypatch.setattr(module, "find_closed", lambda others, seconds: find(places[str(threading.get_ident())], others))
    told = together(board(), table=replace(TABLE, new=(2,), tried=(2,)))
    (ways,) = set(told)
    assert ways is not None and ways.refused == refused and bool(ways.closed) == bool(refused)
    assert sorted(tried) == [(0, 2), (1, 2), (2, 0, 1)]


def test_of_hosts_that_were_reached_before_all_are_tried_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "find_closed", lambda others, seconds: {"2": "timed out"} if {1, 2} == {*others} else {}
    )
    told = together(board(), table=replace(TABLE, new=()))
    (ways,) = set(told)
    assert ways is not None and ways.closed.startswith("1 of 6 ways") and ways.refused == frozenset()


@pytest.mark.parametrize(
    ("closed", "refused"),
    [([], set()), ([(0, 2), (2, 3)], {2}), ([(2, 3)], {3}), ([(2, 3), (1, 3)], {3}), ([(0, 1)], set())],
    ids=["none", "who is kept out alone", "of two new ones the later", "not both", "both were reached before"],
)
def test_a_healthy_new_host_is_not_refused_with_a_bad_one(
    monkeypatch: pytest.MonkeyPatch, closed: list[tuple[int, int]], refused: set[int]
) -> None:
    found = module._choose_refused({frozenset(way) for way in closed}, frozenset({2, 3}), 4)
    assert found == refused


def test_a_host_without_an_address_of_its_own_is_not_knocked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_address", lambda table, place: None if place == 1 else "127.0.0.1")
    assert together(board()) == [Ways()] * 3


def test_who_does_not_come_is_waited_for_no_longer_than_that() -> None:
    began = time.monotonic()
    assert together(board(), (0, 1)) == [None] * 2
    assert time.monotonic() - began < 30
    assert together(board(), (0,), is_over=lambda: True) == [None]


def test_where_workers_will_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address(TABLE, 1) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert own_address(TABLE, 1) is None
