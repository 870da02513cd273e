"""When a checkpoint is due by the time that has passed: rank 0's clock decides, and all ranks save the same step.

Clocks differ, so one of them counts. Its rank says in the agreement of a step that a checkpoint is due, once for each;
every rank reads that at the same step and saves at the next boundary.
"""

import time
from typing import final

from allranks.stepping.agreement import Agreed, Pending
from allranks.units import format_seconds
from allranks.verdict import Decision


@final
class SaveClock:
    """`checkpoint.seconds`, on one rank.

    Args:
        seconds: after which a checkpoint is due; None: never.
        counts: whether it is this rank's clock that counts.

    Attributes:
        due: whether the ranks have agreed that a checkpoint is due; the same on all.
    """

    def __init__(self, seconds: float | None, *, counts: bool) -> None:
        self.due = False
        self._seconds, self._counts = seconds, counts
        self._since = time.monotonic()
        self._voted = False
        self._heard: Pending | None = None

    @property
    def runs(self) -> bool:
        """Whether checkpoints come by time."""
        return self._seconds is not None

    @property
    def key(self) -> str:
        """The config's key that says how often they come."""
        return "checkpoint.seconds" if self.runs else "checkpoint.every"

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """That they do, where they do."""
        if self._seconds is None:
            return ()
        every = format_seconds(self._seconds).removesuffix(" 00 s").removesuffix(" 00 min")
        return (Decision(f"a checkpoint every {every}", "checkpoint.every is not given"),)

    def vote(self) -> bool:
        """Whether this rank tells the others now that one is due; asked once in every agreement.

        Told once it is not told again before that save begins: an agreement may be on its way while it is heard.
        """
        if self._seconds is None or not self._counts or self._voted:
            return False
        self._voted = time.monotonic() - self._since >= self._seconds
        return self._voted

    def hear(self, pending: Pending, agreed: Agreed) -> None:
        """What the ranks have agreed, in its turn; the first agreement may come twice and counts once."""
        if agreed.due and pending is not self._heard:
            self._heard, self.due = pending, True

    def begin(self) -> None:
        """The save that was due begins; if it fails, the next one comes after the same time."""
        self.due = self._voted = False
        self._since = time.monotonic()

    def saved(self) -> None:
        """A checkpoint is there: what writing it took does not count. A vote that is on its way stays."""
        self._since = time.monotonic()
