"""The run's own limit of time: it is left in time to save, whatever would end it then.

A request to stop acts at the next boundary. So each rank asks itself in every step whether a later one would do: what
is between two looks and then behind the second one, and the save, have to fit into what is left.
"""

import time
from collections.abc import Callable
from typing import final

import psutil

from allranks.verdict import Decision


def started_at() -> float:
    """When this process was started, by the clock of `time.monotonic`, which all processes of a host share; at most a
    second early, because the system tells when it was booted in whole seconds.
    """
    return time.monotonic() - (time.time() - psutil.Process().create_time())


@final
class TimeLimit:
    """`train.max_seconds`, as one rank's clock has it.

    Args:
        seconds: after `began`; None: no limit.
        began: by the clock of `time.monotonic`; None: when this process was started.
        lag: how many steps later than its step an agreement is read.
        seconds_to_save: how long a save would take, as far as is known.
    """

    def __init__(
        self, seconds: float | None, began: float | None, lag: int, seconds_to_save: Callable[[], float]
    ) -> None:
        self._seconds = seconds
        self._began = began if began is not None or seconds is None else started_at()
        self._steps_ahead = 2 + lag  # to the next look, and from there to the boundary at which it acts
        self._seconds_to_save = seconds_to_save
        self._looked: float | None = None
        self._longest: float | None = None

    @property
    def ends_at(self) -> float | None:
        """When the time is over, by the clock of `time.monotonic`; None: never."""
        return None if self._seconds is None or self._began is None else self._began + self._seconds

    def is_reached(self) -> bool:
        """Whether the run has to stop now to have saved in time; called once in every step.

        A step is from one look to the next, so that what evaluations and saves take counts. The first one does not:
        where it compiles it says nothing about the others.
        """
        if self._seconds is None or self._began is None:
            return False
        now = time.monotonic()
        if self._looked is not None:
            self._longest = 0.0 if self._longest is None else max(self._longest, now - self._looked)
        self._looked = now
        return now + self._margin() >= self._began + self._seconds

    def explain(self, step: int) -> Decision:
        """Why the run stops after `step` steps, by this rank's clock."""
        assert self._began is not None
        passed, saving = time.monotonic() - self._began, self._seconds_to_save()
        longest = f"a step took up to {self._longest:.3g} s" if self._longest else "no step was timed"
        saves = f"the last save {saving:.3g} s" if saving else "no save was timed"
        because = f"{passed:.0f} s of train.max_seconds={self._seconds:g} have passed; {longest}, {saves}"
        return Decision(f"the run stops after step {step}, saves and ends with 75", because)

    def _margin(self) -> float:
        return self._steps_ahead * (self._longest or 0.0) + self._seconds_to_save()
