"""Sentinels: what must hold in a run that computes what one device does, looked at in every run.

There are two sorts. One looks at each step of its own rank, for a few microseconds, and asks nobody; that it has found
something travels in the agreement which every step makes anyway. The other compares the ranks every so many steps, in
one exchange for all of its kind. Both answer with a Verdict, and are muted by their name.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, final

from allranks.data.micro_step import StepBatch
from allranks.verdict import Verdict


class StepSentinel(ABC):
    """Looks at each step of this rank; must not wait for the device, nor for another rank.

    Attributes:
        name: by which it is muted.
    """

    name: ClassVar[str]

    @abstractmethod
    def look(self, which: str, batch: StepBatch) -> Verdict | None:
        """What is wrong after the backwards of optimizer `which` in the step of `batch`, before its update."""


class RoundSentinel(ABC):
    """Compares the ranks, every so many steps.

    Attributes:
        name: by which it is muted.
    """

    name: ClassVar[str]

    @abstractmethod
    def tell(self) -> Any:
        """What this rank has to tell, as a JSON value."""

    @abstractmethod
    def judge(self, told: Sequence[Any], step: int) -> Verdict | None:
        """What is wrong after `step` steps, by what all ranks tell, in their order.

        The same on every rank. Where it finds something it may ask the ranks for more; collective then.
        """


@final
class Rounds:
    """The steps after which ranks are compared: the first of this process, and every so many.

    Args:
        every: steps between two; 0: none at all.

    Attributes:
        off: whether there are none at all.
    """

    def __init__(self, every: int) -> None:
        self.off = every == 0
        self._every = every
        self._first: int | None = None

    def due(self, step: int) -> bool:
        """Whether that is after step `step` (from 1); the one that is asked about first is the first of all."""
        if self._first is None:
            self._first = step
        return self._every > 0 and (step == self._first or step % self._every == 0)


@final
class Watch:
    """The sentinels that look at each step of a rank, and what they have found.

    Args:
        sentinels: those that are not muted.
        pace: says where this rank stands in a step, which all must have alike; None: nobody asks.

    Attributes:
        noticed: by the sentinel's name what the other ranks have not heard of yet.
    """

    def __init__(self, sentinels: Sequence[StepSentinel] = (), pace: Callable[[StepBatch], str] | None = None) -> None:
        self.noticed: dict[str, Verdict] = {}
        self._sentinels = list(sentinels)
        self._pace = pace

    def look(self, which: str, batch: StepBatch) -> None:
        """Between the backwards of optimizer `which` and its update."""
        for sentinel in self._sentinels:
            if sentinel.name not in self.noticed:
                verdict = sentinel.look(which, batch)
                if verdict is not None:
                    self.noticed[sentinel.name] = verdict

    def say(self, batch: StepBatch | None) -> tuple[str, bool]:
        """(pace, whether something was noticed), for the agreement of this step; None: of no step."""
        return ("" if self._pace is None or batch is None else self._pace(batch)), bool(self.noticed)

    def heard(self, names: Collection[str]) -> None:
        """All ranks have heard what the sentinels of these names have found: they have nothing more to say."""
        self._sentinels = [sentinel for sentinel in self._sentinels if sentinel.name not in names]
        self.noticed = {name: verdict for name, verdict in self.noticed.items() if name not in names}

    def compare_no_pace(self) -> None:
        """From here on ranks are not asked where they stand."""
        self._pace = None
