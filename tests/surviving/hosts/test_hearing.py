"""A question, what all hosts say to it, and the leader's word: on one board, without waiting."""

from collections.abc import Sequence

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from allranks.hosts_request import Endpoint
from allranks.surviving.hosts.ending import Report
from allranks.surviving.hosts.hearing import COLLECT_SECONDS, Hearing
from allranks.surviving.hosts.meeting import MeetingStore
from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Seal, SealError
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

    def attend(self, place: int) -> list[Ruling | None]:
        def judge(statements: Sequence[Statement | None]) -> Ruling | None:
            self.given.append(statements)
            return self.answer

        said = Statement((witness(place, collective(12)),))
        return self.hosts[place].attend(lambda: said, judge if place == 0 else None)


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


def test_what_a_stranger_states_is_refused() -> None:
    found = Round()
    found.hosts[0].ask()
    found.attend(0)
    found.store.write(f"statement/{TABLE.number}/1/1", "cos\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(SealError, match="statement"):
        found.attend(0)
