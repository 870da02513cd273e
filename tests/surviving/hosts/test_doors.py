"""Hosts of a first round that look whether they reach each other, in threads of one process."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts import doors as module
from allranks.surviving.hosts.doors import look_around, own_address
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.table import Table

MEMBERS = tuple(_NodeDesc(name, 8, 0) for name in "abc")
TABLE = Table(4, MEMBERS, "127.0.0.1", 1234, (1, 2, 1), first=True)


def board() -> Notices:
    return Notices(MeetingStore(HashStore(), Endpoint("h", 1), "h", serves=True, call_seconds=5), Seal(b"0" * 16))


def together(notices: Notices, places: tuple[int, ...] = (0, 1, 2), is_over: Any = lambda: False) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda place: look_around(notices, TABLE, place, is_over, 1.0), places))


def test_hosts_that_reach_each_other_say_nothing() -> None:
    assert together(board()) == ["", "", ""]


def test_all_hosts_say_the_same_of_a_closed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_closed", lambda others, seconds: {"2": "timed out"} if 2 in others else {})
    told = together(board())
    assert len(set(told)) == 1 and told[0].startswith("2 of 6 ways between 3 hosts are closed: ")


def test_a_host_without_an_address_of_its_own_is_not_knocked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_address", lambda table, place: None if place == 1 else "127.0.0.1")
    assert together(board()) == ["", "", ""]


def test_who_does_not_come_is_waited_for_no_longer_than_that() -> None:
    began = time.monotonic()
    assert together(board(), (0, 1)) == ["", ""]
    assert time.monotonic() - began < 30
    assert together(board(), (0,), is_over=lambda: True) == [""]


def test_where_workers_will_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address(TABLE, 1) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert own_address(TABLE, 1) is None
