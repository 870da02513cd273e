"""One line of what bench/scale.py measures, and how it counts time."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What a part of the system took at one size.

    Attributes:
        part: of the system; of what: the size.
        microseconds: of the processor; size_bytes: that are sent, kept or written; None where that is not the point.
        reckoned: whether something of it follows from what was measured, and was not made itself.
    """

    part: str
    of: str
    number: int
    microseconds: float | None = None
    size_bytes: int | None = None
    reckoned: bool = False


def timed(call: Callable[[], object], turns: int = 1) -> float:
    """Microseconds of the processor for one call."""
    start = time.process_time()
    for _ in range(turns):
        call()
    return (time.process_time() - start) / turns * 1e6
