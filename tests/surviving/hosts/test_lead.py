"""Who leads, by words that only hosts of the run can have written."""

from unittest import mock

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.lead import Lead
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.seal import Seal, SealError

A, B = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0)
SEAL = Seal(b"0123456789abcdef")


def lead(store: HashStore, node: _NodeDesc, *, serves: bool, seal: Seal = SEAL) -> Lead:
    return Lead(MeetingStore(store, Endpoint("here", 1), "here", serves=serves, call_seconds=5.0), seal, node)


def test_all_find_the_same_leader() -> None:
    store = HashStore()
    leader, other = lead(store, A, serves=True), lead(store, B, serves=False)
    assert other.seek() is None
    assert leader.seek() == other.seek() == leader.seek() == A
    assert leader.held and not other.held


def test_the_same_node_said_by_another_process_is_another_word() -> None:
    store = HashStore()
    assert lead(store, A, serves=True).seek() == A
    twin = lead(store, A, serves=True)
    assert twin.seek() == A and not twin.held


def test_a_strangers_word_makes_nobody_lead() -> None:
    store = HashStore()
    lead(store, A, serves=True, seal=Seal(b"another secret 16")).seek()
    for serves in (True, False):
        with pytest.raises(SealError, match="leader is not signed"):
            lead(store, B, serves=serves).seek()


def test_only_who_led_when_this_host_last_looked_is_taken_for_lost() -> None:
    store = HashStore()
    leader, other = lead(store, A, serves=True), lead(store, B, serves=False)
    with mock.patch.object(MeetingStore, "depose") as depose:
        other.take_for_lost(A)
        assert leader.seek() == other.seek() == A
        word = store.get("leader").decode()
        other.take_for_lost(B)
        leader.take_for_lost(A)
        assert depose.call_args_list == [], "nobody has been seen to lead, another host is lost, it leads itself"
        other.take_for_lost(A)
        assert depose.call_args_list == [mock.call(word)]
