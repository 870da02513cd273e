"""Hearing: what hangs in a round of several hosts. Any of them asks, all of them state, and the leader rules for all.

A host sees only its own workers, and those that wait there are in nobody's way. So who sees that something is wrong
puts a question to all hosts; each says where its workers stand; and the leader says what that means. What would end the
workers is some seconds old then: any host on which the run has gone on meanwhile objects, and nothing follows. Nothing
of it waits: whoever looks does what is due, and looks again.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.seal import Json
from allranks.surviving.hosts.statement import Statement
from allranks.surviving.hosts.table import Table, host_of
from allranks.surviving.ruling import Ruling

COLLECT_SECONDS = 6.0  # that the leader waits for a host's statement: two seconds of questions, and two looks
OBJECT_SECONDS = 1.5  # from a ruling to what follows of it: two looks of another host's
ASK_AGAIN_SECONDS = 15.0  # without a ruling


@final
class Hearing:
    """One host's part in those of one round."""

    def __init__(self, notices: Notices, table: Table, place: int) -> None:
        """`place`: this host's in the table."""
        self._notices = notices
        self._table = table
        self._place = place
        self._wanted = False
        self._asked_at: float | None = None  # None: nothing has been asked here that is not answered
        self._stated = self._heard = 0
        self._stated_at = 0.0
        self._read: tuple[int, float] = (0, 0.0)  # the newest ruling, and when it was first read here

    def ask(self) -> None:
        """Something is wrong here: let it be found out, now or after the question that is open."""
        self._wanted = True

    def attend(
        self,
        state: Callable[[], Statement],
        judge: Callable[[Sequence[Statement | None]], Ruling | None] | None,
        is_outdated: Callable[[Ruling], bool] | None,
    ) -> list[Ruling | None]:
        """Do what is due.

        Args:
            state: says where this host's workers stand.
            judge: the leader's: what all statements mean, by place (None: nothing was heard; for the ruling: nothing
                is wrong); None: this host does not lead.
            is_outdated: whether this host's workers have gone on since they were looked at for a ruling; None: they
                have all ended, and nothing has to be waited for.

        Returns:
            the ruling that is new here, if there is one; None in its place where a host has objected.

        Raises:
            StoreLostError, SealError
        """
        number, now = self._table.number, time.monotonic()
        found = self._notices.read(f"inquiry/{number}")
        asked = found or 0
        if asked <= self._heard:
            lost = self._asked_at is not None and now - self._asked_at > ASK_AGAIN_SECONDS
            if self._wanted or lost:
                self._wanted, self._asked_at = False, now
                # Not over another host's newer question; and never one to which this host has already said something.
                self._notices.replace(f"inquiry/{number}", found, max(self._heard, self._stated) + 1)
            return []
        if asked > self._stated:
            if self._wanted:
                self._wanted, self._asked_at = False, now  # what is wrong is in the statement
            self._notices.post(f"statement/{number}/{asked}/{self._place}", state().to_json())
            self._stated, self._stated_at = asked, time.monotonic()
        told = self._notices.read(f"ruling/{number}")
        if judge is not None and (told is None or told["number"] < asked):
            told = self._rule(asked, judge) or told
        return [] if told is None or told["number"] <= self._heard else self._hear(told, is_outdated)

    def _hear(self, told: Json, is_outdated: Callable[[Ruling], bool] | None) -> list[Ruling | None]:
        """The ruling that is posted, once no host can object to it any more."""
        ruling = None if told["ruling"] is None else Ruling.from_json(told["ruling"])
        if ruling is not None and ruling.failure is not None:
            if self._read[0] != told["number"]:
                self._read = told["number"], time.monotonic()
            key = f"objection/{self._table.number}"
            if is_outdated is not None and is_outdated(ruling):
                self._notices.post(key, told["number"])
            if (self._notices.read(key) or 0) >= told["number"]:
                ruling = None
            elif is_outdated is not None and time.monotonic() - self._read[1] < OBJECT_SECONDS:
                return []
        self._heard, self._asked_at = told["number"], None
        return [ruling]

    def _rule(self, asked: int, judge: Callable[[Sequence[Statement | None]], Ruling | None]) -> Json | None:
        """The leader's, once all have spoken or have had their time: what it has posted; None: nothing yet."""
        statements = [self._statement(asked, place) for place in range(len(self._table.members))]
        if None in statements and time.monotonic() - self._stated_at < COLLECT_SECONDS:
            return None
        ruling = judge(statements)
        told = {"number": asked, "ruling": None if ruling is None else ruling.to_json()}
        self._notices.post(f"ruling/{self._table.number}", told)
        return told

    def _statement(self, asked: int, place: int) -> Statement | None:
        told = self._notices.read(f"statement/{self._table.number}/{asked}/{place}")
        if told is not None:
            return Statement.from_json(told, host_of(self._table.members[place]))
        if self._notices.has_reported(self._table.number, place):
            return Statement()  # all of its workers have ended
        return None
