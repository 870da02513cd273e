"""Who lives, as far as signs of life tell."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.presence import SUSPECT_SECONDS, Presence
from allranks.surviving.hosts.state import LONG_AGO, StateReader

A, B, C = (_NodeDesc(name, 1, 0) for name in "abc")


def presence(**ages: float) -> Presence:
    """Hosts whose last sign of life is so many seconds old; all of them take part."""
    found, now = Presence(8.0, StateReader(time.monotonic)), datetime.now(UTC)
    found.state.last_heartbeats = {_NodeDesc(name, 1, 0): now - timedelta(seconds=age) for name, age in ages.items()}
    found.state.participants = dict.fromkeys(found.state.last_heartbeats, 0)
    return found


def test_who_says_nothing_for_too_long_or_never_said_anything_is_silent() -> None:
    found = presence(a=7.0, b=9.0)
    assert [found.is_silent(node) for node in (A, B, C)] == [False, True, True]
    assert found.living([A, B, C]) == {A}


def test_who_is_silent_or_has_left_is_gone_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.surviving.hosts.presence.time.monotonic", lambda: now[0])
    found = presence(a=0.0, b=9.0, c=0.0)
    found.begin_round([A, B, C])
    del found.state.participants[C]
    now[0] = 105.0
    assert found.gone([A, B, C]) == {B: 5.0, C: 0.0}, "c lives and has left"
    found.state.last_heartbeats[C] -= timedelta(seconds=60)
    now[0] = 108.0
    assert found.gone([A, B, C]) == {B: 8.0, C: 3.0}


def test_a_suspect_is_taken_for_lost_after_a_shorter_silence() -> None:
    found = presence(a=SUSPECT_SECONDS - 1, b=SUSPECT_SECONDS + 1)
    told = StateReader(time.monotonic).write(found.state, 1)
    found.state = found._reader.read(told)
    assert found._reader.read(told).last_heartbeats[B] != LONG_AGO
    found.state = presence(a=SUSPECT_SECONDS - 1, b=SUSPECT_SECONDS + 1).state
    assert [found.suspect(node) for node in (A, B)] == [False, True]
    found.await_survivors(A, (A, B))
    assert found._reader.awaited == {A}, "before the state is read again"
    seen = found._reader.read(told).last_heartbeats
    assert seen[B] == LONG_AGO != seen[A]


def test_a_round_awaits_the_living_of_the_last_one_and_who_wants_to_join() -> None:
    found = presence(a=0.0, b=9.0, c=0.0)
    newcomer = _NodeDesc("d", 1, 0)
    found.state.wait_list = {newcomer}
    found.state.last_heartbeats[newcomer] = datetime.now(UTC)
    found.await_survivors(A, ())
    assert not found._reader.awaited, "the first round begins after a last call"
    found.await_survivors(A, (A, B, C))
    assert found._reader.awaited == {A, C, newcomer}


def test_who_waits_lives_with_room_or_without() -> None:
    found = presence(a=0.0, b=9.0, c=0.0)
    found.state.redundancy_list, found.state.wait_list = {B, C}, {A}
    assert found.waiting() == {A, C}
    found.await_survivors(B, [B])
    assert found._reader.awaited == {A, B, C}, "who waits has its place in the next round"
