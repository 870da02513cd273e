"""Who lives, as far as signs of life tell."""

from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.surviving.hosts.presence import Presence

A, B, C = (_NodeDesc(name, 1, 0) for name in "abc")


def presence(**ages: float) -> Presence:
    """Hosts whose last sign of life is so many seconds old; all of them take part."""
    found, now = Presence(8.0), datetime.now(UTC)
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
