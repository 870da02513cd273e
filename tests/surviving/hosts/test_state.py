"""torch's state as JSON: nothing is lost, and no clock of another host counts."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from allranks.surviving.hosts import state as module
from allranks.surviving.hosts.state import StateReader

A, B, C = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0), _NodeDesc("c", 3, 1)


class Clock:
    """A host's clocks: monotonic seconds, and a wall clock that may be anywhere."""

    def __init__(self, wrong_by: float = 0.0) -> None:
        self.now = 100.0
        self._wrong_by = timedelta(seconds=wrong_by)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now) + self._wrong_by


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    use(found, monkeypatch)
    return found


def use(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wall(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return clock.wall()

    monkeypatch.setattr(module, "datetime", Wall)


def state_at(when: datetime) -> _RendezvousState:
    state = _RendezvousState()
    state.round, state.complete, state.closed = 3, True, True
    state.participants = {B: 1, A: 0}
    state.wait_list, state.redundancy_list = {C}, {A}
    state.last_heartbeats = {A: when, B: when}
    state.deadline = when + timedelta(seconds=5)
    return state


def test_there_and_back(clock: Clock) -> None:
    before = state_at(clock.wall())
    writer, reader = StateReader(clock.monotonic), StateReader(clock.monotonic)
    after = reader.read(json.loads(json.dumps(writer.write(before, 7))))
    assert vars(after) == vars(before)


def test_a_host_whose_clock_is_wrong_is_as_alive_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Clock(wrong_by=-20.0)
    use(there, monkeypatch)
    writer = StateReader(there.monotonic)
    told = writer.write(state_at(there.wall()), 1)
    here = Clock()
    use(here, monkeypatch)
    reader = StateReader(here.monotonic)
    assert reader.read(told).last_heartbeats[B] == here.wall()
    assert reader.read(told).deadline == here.wall() + timedelta(seconds=5)
    here.now += 4
    silent = reader.read(told).last_heartbeats[B]
    assert here.wall() - silent == timedelta(seconds=4), "no sign of life since"
    assert reader.read(told).deadline == here.wall() + timedelta(seconds=1)


def test_only_what_torch_has_renewed_is_a_sign_of_life(clock: Clock) -> None:
    reader = StateReader(clock.monotonic)
    state = reader.read(StateReader(clock.monotonic).write(state_at(clock.wall()), 1))
    clock.now += 3
    again = reader.read(reader.write(state, 2))
    assert {clock.wall() - seen for seen in again.last_heartbeats.values()} == {timedelta(seconds=3)}
    again.last_heartbeats[A] = clock.wall()
    renewed = reader.read(reader.write(again, 3))
    ages = {node: (clock.wall() - seen).total_seconds() for node, seen in renewed.last_heartbeats.items()}
    assert ages == {A: 0.0, B: 3.0}


def test_while_the_store_was_away_nobody_was_silent(clock: Clock) -> None:
    away = 0.0
    reader = StateReader(lambda: clock.now - away)
    told = StateReader(clock.monotonic).write(state_at(clock.wall()), 1)
    reader.read(told)
    clock.now, away = clock.now + 23.0, 20.0
    assert clock.wall() - reader.read(told).last_heartbeats[B] == timedelta(seconds=3)


def test_who_is_taken_for_lost_is_so_until_the_next_sign_of_life(clock: Clock) -> None:
    told = StateReader(clock.monotonic).write(state_at(clock.wall()), 1)
    reader = StateReader(clock.monotonic)
    reader.take_for_lost(B)
    assert reader.read(told).last_heartbeats[B] == clock.wall(), "nobody has seen it yet"
    reader.take_for_lost(B)
    seen = reader.read(told)
    assert (seen.last_heartbeats[B], seen.last_heartbeats[A]) == (module.LONG_AGO, clock.wall())
    again = reader.read(reader.write(seen, 2))
    assert again.last_heartbeats[B] == module.LONG_AGO, "what is handed on is no sign of life"
    again.last_heartbeats[B] = clock.wall()
    assert reader.read(reader.write(again, 3)).last_heartbeats[B] == clock.wall()


def test_when_all_who_are_awaited_are_there_nobody_is_waited_for(clock: Clock) -> None:
    told = StateReader(clock.monotonic).write(state_at(clock.wall()), 1)
    reader = StateReader(clock.monotonic)
    reader.awaited = frozenset({A, B, C})
    assert reader.read(told).deadline == clock.wall() + timedelta(seconds=5)
    reader.awaited = frozenset({A, B})
    seen = reader.read(told)
    assert seen.deadline == module.LONG_AGO
    assert reader.write(seen, 2)["deadline"] == told["deadline"], "others decide for themselves"
