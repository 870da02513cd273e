"""Which host of a round is lost; test_company.py has hosts that fall silent."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.surviving.hosts.suspicion import find_lost
from allranks.surviving.hosts.table import Table

A, B, C = (_NodeDesc(name, 8, 0) for name in "abc")
TABLE = Table(4, (A, B, C), "127.0.0.1", 1234, (1, 2, 1))


@pytest.mark.parametrize(
    ("gone", "cut_off", "silent", "reported", "lost"),
    [
        ({}, False, {A, C}, (), None),
        ({C: 12.0}, False, set(), (), C),
        ({C: 12.0}, False, set(), (2,), None),
        ({}, True, {C}, (), C),
        ({}, True, {C}, (2,), None),
        ({}, True, set(), (), None),
        ({}, True, {A, C}, (), A),
        ({A: 11.0}, True, set(), (0,), None),
        ({A: 12.0}, True, set(), (0,), A),
        ({B: 12.0}, True, {B}, (), None),
    ],
    ids=[
        "silence that is short, and no connection lost",
        "silence",
        "it may have left",
        "a connection lost, and silence",
        "it lives: it has reported",
        "a connection lost",
        "the leader first",
        "the leader has reported",
        "and says nothing more",
        "not this host itself",
    ],
)
def test_who_is_lost(
    gone: dict[_NodeDesc, float], cut_off: bool, silent: set[_NodeDesc], reported: tuple[int, ...], lost: Any
) -> None:
    taken = list[_NodeDesc]()
    notices: Any = SimpleNamespace(
        lost_a_peer=lambda number, num_hosts: cut_off, has_reported=lambda number, place: place in reported
    )
    presence: Any = SimpleNamespace(gone=lambda members: gone, suspect=lambda node: node in silent)
    lead: Any = SimpleNamespace(take_for_lost=taken.append)
    failure = find_lost(TABLE, B, notices, presence, lead, GuardConfig())
    assert taken == ([] if lost is None else [lost])
    assert (failure and (failure.host, failure.rank)) == (lost and (lost.addr, {A: 0, C: 3}[lost]))
    if failure is not None:
        assert ("workers have lost their connection" in failure.message) == (lost not in gone)
