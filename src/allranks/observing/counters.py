"""Where a worker's time went, by cause."""

import time
from typing import Literal, final

Cause = Literal["input", "forward_backward", "optimizer", "agreement", "evaluation", "checkpoint", "other"]
CAUSES: tuple[Cause, ...] = (
    "input",
    "forward_backward",
    "optimizer",
    "agreement",
    "evaluation",
    "checkpoint",
    "other",
)


@final
class Stopwatch:
    """Splits the time since it was made into named causes, without a gap: each `mark` names what has just ended.

    It measures the host's clock. On CUDA, where the host runs ahead, the time of a kernel is found where the host next
    waits for it, mostly under "agreement".
    """

    __slots__ = ("_last", "_seconds")

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._last = time.perf_counter()

    def mark(self, cause: Cause) -> None:
        """The time since the last mark belongs to `cause` (a KeyError for any other word)."""
        now = time.perf_counter()
        self._seconds[cause] += now - self._last
        self._last = now

    def totals(self) -> dict[str, float]:
        """Seconds by cause; their sum is the time from the making of this Stopwatch to the last mark."""
        return {cause: round(seconds, 6) for cause, seconds in self._seconds.items()}
