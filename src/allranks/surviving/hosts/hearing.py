"""Hearing: what hangs in a round of several hosts. Any of them asks, all of them state, and the leader rules for all.

A host sees only its own workers, and those that wait there are in nobody's way. So who sees that something is wrong
puts a question to all hosts; each says where its workers stand; and the leader says what that means. Nothing of it
waits: whoever looks does what is due, and looks again.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

from allranks.surviving.hosts.notices import Notices
from allranks.surviving.hosts.statement import Statement
from allranks.surviving.hosts.table import Table, host_of
from allranks.surviving.ruling import Ruling

COLLECT_SECONDS = 6.0  # that the leader waits for a host's statement: two seconds of questions, and two looks


@final
class Hearing:
    """One host's part in those of one round."""

    def __init__(self, notices: Notices, table: Table, place: int) -> None:
        """`place`: this host's in the table."""
        self._notices = notices
        self._table = table
        self._place = place
        self._wanted = False
        self._stated = self._heard = 0
        self._stated_at = 0.0

    def ask(self) -> None:
        """Something is wrong here: let it be found out, now or after the question that is open."""
        self._wanted = True

    def attend(
        self,
        state: Callable[[], Statement],
        judge: Callable[[Sequence[Statement | None]], Ruling | None] | None,
    ) -> list[Ruling | None]:
        """Do what is due.

        Args:
            state: says where this host's workers stand.
            judge: the leader's: what all statements mean, by place (None: nothing was heard; for the ruling: nothing
                is wrong); None: this host does not lead.

        Returns:
            the ruling that is new here, if there is one.

        Raises:
            StoreLostError, SealError
        """
        number = self._table.number
        asked = self._notices.read(f"inquiry/{number}") or 0
        if asked <= self._heard:
            if self._wanted:
                self._wanted = False
                self._notices.post(f"inquiry/{number}", self._heard + 1)
            return []
        if asked > self._stated:
            self._notices.post(f"statement/{number}/{asked}/{self._place}", state().to_json())
            self._stated, self._stated_at = asked, time.monotonic()
        if judge is not None:
            self._rule(asked, judge)
        told = self._notices.read(f"ruling/{number}")
        if told is None or told["number"] <= self._heard:
            return []
        self._heard = told["number"]
        return [None if told["ruling"] is None else Ruling.from_json(told["ruling"])]

    def _rule(self, asked: int, judge: Callable[[Sequence[Statement | None]], Ruling | None]) -> None:
        """The leader's, once all have spoken or have had their time."""
        statements = [self._read(asked, place) for place in range(len(self._table.members))]
        if None in statements and time.monotonic() - self._stated_at < COLLECT_SECONDS:
            return
        ruling = judge(statements)
        told = {"number": asked, "ruling": None if ruling is None else ruling.to_json()}
        self._notices.post(f"ruling/{self._table.number}", told)

    def _read(self, asked: int, place: int) -> Statement | None:
        told = self._notices.read(f"statement/{self._table.number}/{asked}/{place}")
        if told is not None:
            return Statement.from_json(told, host_of(self._table.members[place]))
        if self._notices.has_reported(self._table.number, place):
            return Statement()  # all of its workers have ended
        return None
