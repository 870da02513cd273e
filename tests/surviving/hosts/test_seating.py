"""Who sits where: a table is there when all have said how many workers they have."""

import socket
from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.errors import LayoutError
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts import seating
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal
from allranks.surviving.hosts.seating import Seating

A, B, C = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0), _NodeDesc("c", 3, 0)


@pytest.fixture
def pair() -> tuple[Seating, Seating]:
    store, found = HashStore(), []
    for node, workers in ((B, 2), (A, 3)):
        meeting = MeetingStore(store, Endpoint("127.0.0.1", 1), "127.0.0.1", serves=node == B, call_seconds=5.0)
        found.append(Seating(meeting, Notices(meeting, Seal(b"0123456789abcdef")), node, workers))
    return found[0], found[1]


def test_all_find_the_table_that_the_leader_has_opened(pair: tuple[Seating, Seating]) -> None:
    leader, other = pair
    leader.attempt = lambda: 7
    leader.announce(5, (A, B))
    assert leader.open(5, (A, B)) is None and other.find(5, (A, B)) is None
    other.announce(5, (A, B))
    assert other.find(5, (A, B)) is None, "the leader opens it"
    table = leader.open(5, (A, B))
    assert table is not None and (table.number, table.members, table.workers) == (5, (B, A), (2, 3)), "it comes first"
    assert other.find(5, (A, B)) == table and table.address == "127.0.0.1"
    assert table.attempt == 7 and table.new == table.tried == (0, 1), "nobody has sat in a round before"
    listening = {
        one.laddr.ip
        for one in psutil.Process().net_connections()
        if one.status == psutil.CONN_LISTEN and one.laddr.port == table.port
    }
    assert listening == {"127.0.0.1"}, "at the address of the endpoint alone"
    leader.announce(6, (A, B))
    assert leader.open(6, (A, B)) is None, "another round has another table"


def test_the_table_has_the_addresses_of_all_hosts(
    pair: tuple[Seating, Seating], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = pair
    for one, addresses in ((leader, ["10.0.0.1", "172.17.0.1"]), (other, ["10.0.0.2", "172.17.0.1"])):
        monkeypatch.setattr(seating, "own_addresses", lambda addresses=addresses: addresses)
        one.announce(5, (A, B))
    table = leader.open(5, (A, B))
    assert table is not None and table == other.find(5, (A, B))
    assert table.addresses == ("10.0.0.1", "10.0.0.2"), "both have the bridge"
    leader.announce(6, (B,))
    alone = leader.open(6, (B,))
    assert alone is not None and alone.addresses == (), "it has no way to another"


def test_own_addresses_are_those_of_the_networks_that_a_host_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(family: socket.AddressFamily, address: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=address)

    found = {
        "lo": [of(socket.AF_INET, "127.0.0.1"), of(socket.AF_INET6, "::1")],
        "eth0": [of(socket.AF_INET, "10.0.0.1"), of(socket.AF_INET6, "fe80::1%eth0"), of(socket.AF_PACKET, "00:11")],
        "eth1": [of(socket.AF_INET6, "2001:db8::1")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert seating.own_addresses() == ["10.0.0.1", "2001:db8::1"]

    def barred() -> None:
        raise PermissionError("netlink")

    monkeypatch.setattr(psutil, "net_if_addrs", barred)
    assert seating.own_addresses() == []


def test_who_was_reached_in_a_round_is_not_new_to_whoever_leads_later(pair: tuple[Seating, Seating]) -> None:
    leader, other = pair
    for number, new in ((5, (0, 1)), (6, (0, 1)), (7, ())):
        leader.announce(number, (A, B))
        other.announce(number, (A, B))
        opened = leader.open(number, (A, B))
        assert opened is not None and opened == other.find(number, (A, B)) and opened.new == new
        if number == 6:  # not in 5, say, where a way was closed
            leader.know()
            other.know()
    leader.doubts = True
    opened = leader.open(7, (A, B))
    assert opened is not None and opened == other.find(7, (A, B)) and (opened.new, opened.tried) == ((), (0, 1))
    leader.know()
    assert not leader.doubts, "they are reached"


def test_a_spare_that_leads_is_new_and_the_others_are_not(pair: tuple[Seating, Seating]) -> None:
    spare, other = pair
    other.know()
    for one in pair:
        one.announce(8, (A, B))
    opened = spare.open(8, (A, B))
    assert opened is not None and [opened.members[place] for place in opened.new] == [B]


def test_whom_the_layout_leaves_over_has_no_place_and_who_has_trained_keeps_it(pair: tuple[Seating, Seating]) -> None:
    leader, other = pair  # with two workers, and with three
    leader.seat = lambda workers: (*workers[:1], *(0 for _ in workers[1:]))
    for one in pair:
        one.announce(5, (A, B))
    table = leader.open(5, (A, B))
    assert table is not None and table == other.find(5, (A, B))
    assert (table.members, table.workers, table.spares) == ((B,), (2,), ("a",)) and table.addresses == ()
    leader.seat = lambda workers: (2, 2)
    for one in pair:
        one.announce(6, (A, B))
    table = leader.open(6, (A, B))
    assert table is not None and table == other.find(6, (A, B))
    assert (table.members, table.workers, table.spares) == ((B, A), (2, 2), ("1 of 3 workers on a",))


def test_of_two_hosts_the_one_that_has_trained_before_goes_on() -> None:
    store, found, nodes = HashStore(), [], (A, B, C)
    for node in nodes:
        meeting = MeetingStore(store, Endpoint("127.0.0.1", 1), "127.0.0.1", serves=node == A, call_seconds=5.0)
        found.append(Seating(meeting, Notices(meeting, Seal(b"0123456789abcdef")), node, 1))
    leader, _, trained = found
    leader.seat = lambda workers: (1, 1, 0)
    trained.know()
    for one in found:
        one.announce(5, nodes)
    table = leader.open(5, nodes)
    assert table is not None and (table.members, table.spares) == ((A, C), ("b",))


def test_too_few_for_the_layout_are_told_to_all_and_forgotten_in_the_next_round(pair: tuple[Seating, Seating]) -> None:
    def refuse(workers: Sequence[int]) -> tuple[int, ...]:
        raise LayoutError(f"not {sum(workers)}")

    leader, other = pair
    leader.seat = refuse
    for one in pair:
        one.announce(5, (A, B))
    assert leader.open(5, (A, B)) is None and other.find(5, (A, B)) is None
    assert (leader.short, other.short) == ("not 5", "not 5")
    leader.seat = tuple
    for one in pair:
        one.announce(6, (A, B))
    assert leader.open(6, (A, B)) == other.find(6, (A, B)) is not None and (leader.short, other.short) == ("", "")


def test_a_host_that_waits_is_known_by_its_number_of_workers(pair: tuple[Seating, Seating]) -> None:
    leader, other = pair
    assert leader.workers_of(A) == 0
    other.introduce()
    assert leader.workers_of(A) == 3
