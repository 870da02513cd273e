"""Which host of a round is lost; test_company.py has hosts that fall silent."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.config_guard import GuardConfig
from allranks.failure import Failure
from allranks.surviving.hosts.suspicion import find_lost, find_more_lost
from allranks.surviving.hosts.table import Table

A, B, C = (_NodeDesc(name, 8, 0) for name in "abc")
TABLE = Table(4, (A, B, C), "127.0.0.1", 1234, (1, 2, 1))


@pytest.mark.parametrize(
    ("gone", "cut_off", "silent", "reported", "lost"),
    [
        ({}, False, {A, C}, (), []),
        ({C: 12.0}, False, set(), (), [C]),
        ({C: 12.0}, False, set(), (2,), []),
        ({}, True, {C}, (), [C]),
        ({}, True, {C}, (2,), []),
        ({}, True, set(), (), []),
        ({}, True, {A, C}, (), [A, C]),
        ({A: 12.0, C: 12.0}, False, set(), (), [A, C]),
        ({C: 12.0}, True, {A}, (), [A, C]),
        ({A: 11.0}, True, set(), (0,), []),
        ({A: 12.0}, True, set(), (0,), [A]),
        ({B: 12.0}, True, {B}, (), []),
    ],
    ids=[
        "silence that is short, and no connection lost",
        "silence",
        "it may have left",
        "a connection lost, and silence",
        "it lives: it has reported",
        "a connection lost",
        "two, the leader first",
        "two, by their silence",
        "two, of which one was silent earlier",
        "the leader has reported",
        "and says nothing more",
        "not this host itself",
    ],
)
def test_who_is_lost(
    gone: dict[_NodeDesc, float],
    cut_off: bool,
    silent: set[_NodeDesc],
    reported: tuple[int, ...],
    lost: list[_NodeDesc],
) -> None:
    taken = list[_NodeDesc]()
    notices: Any = SimpleNamespace(
        lost_a_peer=lambda number, num_hosts: cut_off, has_reported=lambda number, place: place in reported
    )
    presence: Any = SimpleNamespace(gone=lambda members: gone, suspect=lambda node: node in silent)
    lead: Any = SimpleNamespace(take_for_lost=taken.append)
    failure = find_lost(TABLE, B, notices, presence, lead, GuardConfig())
    assert taken == lost, "all at once: the next round awaits none of them"
    assert (failure is None) == (not lost)
    if failure is not None:
        assert (failure.host, failure.rank) == (lost[0].addr, {A: 0, C: 3}[lost[0]])
        assert ("workers have lost their connection" in failure.message) == (lost[0] not in gone)


@pytest.mark.parametrize(
    ("silent", "reports", "is_lost", "looks"),
    [(set(), {}, False, 1), ({C}, {}, True, 1), (set(), {2: 3}, True, 3), (set(), {}, True, 13)],
    ids=["nobody is lost", "no other lives", "until all have reported", "and not for ever"],
)
def test_before_the_next_round_who_has_not_reported_is_looked_at_for_a_while(
    monkeypatch: pytest.MonkeyPatch, silent: set[_NodeDesc], reports: dict[int, int], is_lost: bool, looks: int
) -> None:
    """`reports`: the place of a host -> the look by which it has reported."""
    now, looked = [100.0], list[float]()
    monkeypatch.setattr("allranks.surviving.hosts.suspicion.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "allranks.surviving.hosts.suspicion.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    notices: Any = SimpleNamespace(has_reported=lambda number, place: len(looked) >= reports.get(place, 1000))
    presence: Any = SimpleNamespace(living=lambda nodes: set(nodes) - {A, *silent})
    failure = Failure(0, "a", 8, 2.5, 76, "its host is lost") if is_lost else None

    def look() -> Failure | None:
        looked.append(now[0])
        return failure

    find_more_lost(look, TABLE, B, notices, presence)
    assert len(looked) == looks
    find_more_lost(lambda: pytest.fail("there was no round"), Table(0, (), "", 0), B, notices, presence)
