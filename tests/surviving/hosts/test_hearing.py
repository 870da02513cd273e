"""A question, what all hosts say to it, and the leader's word: on one board, without waiting."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.failure import Failure
from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.hearing import ASK_AGAIN_SECONDS, COLLECT_SECONDS, OBJECT_SECONDS, Hearing
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Json, Seal, SealError
from allranks.surviving.hosts.statement import Statement
from allranks.surviving.hosts.table import Table
from allranks.surviving.ruling import Ruling
from allranks.verdict import Verdict
from tests.surviving.rows import collective, witness

TABLE = Table(3, (_NodeDesc("a", 8, 0), _NodeDesc("b", 9, 0)), "", 0, (1, 1))
RULING = Ruling(Verdict("straggler", "rank 1 on b is busy", (), "look"), (1,), 12)


class Round:
    """Two hosts, the first of which leads; what each has said, and what the leader was given."""

    def __init__(self) -> None:
        self.store = MeetingStore(HashStore(), Endpoint("here", 1), "here", serves=True, call_seconds=5.0)
        self.board = Notices(self.store, Seal(b"0123456789abcdef"))
        self.hosts = [Hearing(self.board, TABLE, place) for place in (0, 1)]
        self.given: list[Sequence[Statement | None]] = []
        self.answer: Ruling | None = RULING
        self.gone_on: set[int] = set()  # the hosts whose workers have

    def attend(self, place: int) -> list[Ruling | None]:
        def judge(statements: Sequence[Statement | None]) -> Ruling | None:
            self.given.append(statements)
            return self.answer

        said = Statement((witness(place, collective(12)),))
        return self.hosts[place].attend(
            lambda: said, judge if place == 0 else None, lambda ruling: place in self.gone_on
        )


@pytest.mark.parametrize("asks", [0, 1])
def test_who_asks_hears_what_all_hear(asks: int) -> None:
    found = Round()
    assert (found.attend(0), found.attend(1)) == ([], [])
    found.hosts[asks].ask()
    heard: list[list[Ruling | None]] = [[], []]
    for _ in range(4):
        for place in (0, 1):
            heard[place] += found.attend(place)
    assert heard == [[RULING], [RULING]]
    ((first, second),) = found.given
    assert first is not None and second is not None
    assert [one.host for one in (*first.found, *second.found)] == ["a", "b"]
    assert [one.row.rank for one in (*first.found, *second.found)] == [0, 1]


def test_a_question_after_another_is_answered_too_and_nothing_wrong_is_an_answer() -> None:
    found = Round()
    found.answer = None
    for _ in range(2):
        found.hosts[1].ask()
        heard = [ruling for _ in range(4) for place in (0, 1) for ruling in found.attend(place)]
        assert heard == [None, None]
    assert len(found.given) == 2


def test_a_host_that_says_nothing_is_waited_for_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.surviving.hosts.hearing.time.monotonic", lambda: now[0])
    found = Round()
    found.hosts[0].ask()
    assert [found.attend(0), found.attend(0)] == [[], []] and found.given == []
    now[0] += COLLECT_SECONDS
    assert found.attend(0) == [RULING]
    ((first, second),) = found.given
    assert first is not None and second is None


def test_a_host_whose_workers_have_all_ended_is_not_waited_for() -> None:
    found = Round()
    found.board.report(TABLE.number, 1, Report(0))
    found.hosts[0].ask()
    found.attend(0)
    assert found.attend(0) == [RULING] and found.given[0][1] == Statement()


def test_a_question_that_is_lost_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.surviving.hosts.hearing.time.monotonic", lambda: now[0])
    found = Round()
    found.hosts[1].ask()
    found.attend(1)
    found.attend(1)  # it has stated as well
    found.board.post(f"inquiry/{TABLE.number}", 0)
    assert [found.attend(place) for place in (1, 0, 1, 0)] == [[]] * 4
    now[0] += ASK_AGAIN_SECONDS + 1
    heard = [ruling for _ in range(3) for place in (1, 0) for ruling in found.attend(place)]
    assert heard == [RULING, RULING] and all(one is not None for one in found.given[0])
    now[0] += ASK_AGAIN_SECONDS + 1
    assert [found.attend(place) for place in (1, 0, 1)] == [[]] * 3 and len(found.given) == 1, "that was the answer"


def test_a_question_is_not_written_over_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found, key = Round(), f"inquiry/{TABLE.number}"
    read = found.board.read
    found.hosts[1].ask()

    def slow_read(name: str) -> Json | None:
        """Another host asks, twice and more, between this one's look and its word."""
        seen = read(name)
        if name == key and seen is None:
            found.board.post(key, 3)
        return seen

    monkeypatch.setattr(found.board, "read", slow_read)
    found.attend(1)
    assert read(key) == 3
    assert [found.attend(1), found.attend(0)] == [[], [RULING]] and found.attend(1) == [RULING]


@pytest.mark.parametrize("who", [None, 0, 1])
def test_nothing_follows_of_a_ruling_where_the_run_has_gone_on_since(
    who: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("allranks.surviving.hosts.hearing.time.monotonic", lambda: now[0])
    found = Round()
    found.answer = replace(RULING, failure=Failure(1, "b", 9, 2.5, 93, "busy", hung=True))
    found.hosts[0].ask()
    for place in (0, 0, 1, 0):
        assert found.attend(place) == [], "who could object has time for it"
    if who is not None:
        found.gone_on.add(who)
    now[0] += OBJECT_SECONDS / 2
    found.attend(1)
    now[0] += OBJECT_SECONDS
    heard = [ruling for place in (0, 1, 0, 1) for ruling in found.attend(place)]
    if who is None:
        assert heard == [found.answer] * 2
    else:
        assert heard[-1] is None and found.answer not in heard
    assert len(found.given) == 1


def test_a_host_whose_workers_have_ended_hears_at_once_why() -> None:
    found = Round()
    found.answer = replace(RULING, failure=Failure(1, "b", 9, 2.5, 93, "busy", hung=True))
    found.hosts[0].ask()
    assert [found.attend(place) for place in (0, 0, 1, 0)] == [[]] * 4
    assert found.hosts[1].attend(Statement, None, None) == [found.answer]


def test_what_a_stranger_states_is_refused() -> None:
    found = Round()
    found.hosts[0].ask()
    found.attend(0)
    found.store.write(f"statement/{TABLE.number}/1/1", "cos\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(SealError, match="statement"):
        found.attend(0)
