"""How long a store may be away, and what the clock of signs of life makes of it."""

import time
from collections.abc import Callable

import pytest

from allranks.surviving.hosts import patience as module
from allranks.surviving.hosts.etcd import EtcdError, EtcdSilentError, LeaseGoneError
from allranks.surviving.hosts.patience import Patience
from allranks.surviving.hosts.place import StoreLostError


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves."""
    found = [100.0]

    def sleep(seconds: float) -> None:
        found[0] += seconds

    monkeypatch.setattr("allranks.surviving.hosts.patience.time.monotonic", lambda: found[0])
    monkeypatch.setattr("allranks.surviving.hosts.patience.time.sleep", sleep)
    return found


def away_until(end: float) -> Callable[[], str]:
    """A call that takes a second until somebody answers."""

    def call() -> str:
        if time.monotonic() < end:
            time.sleep(1.0)
            raise EtcdSilentError("Connection refused")
        return "answer"

    return call


def test_a_store_that_comes_back_in_time_is_not_lost_and_nobody_was_silent(now: list[float]) -> None:
    patience = Patience(8.0)
    assert patience.call(away_until(0)) == "answer" and patience.clock() == 100.0
    assert patience.call(away_until(107.0)) == "answer"
    assert now[0] > 107.0 and patience.clock() == pytest.approx(100.0), "it stood still"
    now[0] += 5.0
    assert patience.clock() == pytest.approx(105.0), "and goes on"
    assert patience.call(away_until(now[0] + 7.0)) == "answer", "each time it may be away as long"
    assert patience.clock() == pytest.approx(105.0)


def test_a_store_that_stays_away_is_lost_for_ever(now: list[float]) -> None:
    patience = Patience(8.0)
    with pytest.raises(StoreLostError, match="no answer for 8 s: Connection refused"):
        patience.call(away_until(1000.0))
    assert 108.0 < now[0] < 108.0 + 1.0 + module.RETRY_SECONDS + 0.1
    with pytest.raises(StoreLostError, match="no answer for 8 s"):
        patience.call(away_until(0))


def test_a_host_that_was_frozen_in_a_call_asks_once_more(now: list[float]) -> None:
    patience, asked = Patience(8.0), list[float]()

    def call() -> str:
        asked.append(now[0])
        if len(asked) == 1:
            now[0] += 60.0
            raise EtcdSilentError("timed out")
        return "answer"

    assert patience.call(call) == "answer" and len(asked) == 2
    assert patience.clock() == pytest.approx(100.0), "in which nobody can have given a sign"


def test_a_refusal_is_final_and_the_first_reason_stays(now: list[float]) -> None:
    patience = Patience(8.0)

    def refuse() -> None:
        raise EtcdError("it refuses: no")

    with pytest.raises(StoreLostError, match="it refuses: no"):
        patience.call(refuse)
    patience.lose("another reason")
    with pytest.raises(StoreLostError, match="it refuses: no"):
        patience.call(away_until(0))
    assert now[0] == 100.0 and patience.refused


def test_a_lease_that_has_ended_and_silence_are_no_refusals(now: list[float]) -> None:
    def end() -> None:
        raise LeaseGoneError("ended")

    for call in (end, away_until(1000.0)):
        patience = Patience(8.0)
        with pytest.raises(StoreLostError):
            patience.call(call)
        assert not patience.refused
