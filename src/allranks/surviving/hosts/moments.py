"""When the failures that hosts report happened, by the clock of the host that judges; no other host's is trusted.

A report says how long before it was posted its failure was. Here it was not there at one look and there at the next.
The two bound when it happened: what its host's own clock says counts as far as it lies between, so that clocks that
agree lose nothing, and one that is wrong by more moves no failure by more than the time between two looks.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import final

from allranks.failure import Failure, first_failure
from allranks.surviving.hosts.ending import Report

Reports = Sequence[Report | None]


@final
class Moments:
    """Of one round, by the wall clock of this host."""

    def __init__(self) -> None:
        self._looked = time.time()
        self._came: dict[
            int, tuple[float, float]
        ] = {}  # place -> the look before its report was there, and the one with

    def look(self, read: Callable[[], Reports]) -> Reports:
        """Read what hosts have reported by now, and see who has done so since the last look."""
        began = time.time()
        reports = read()
        ended = time.time()
        for place, report in enumerate(reports):
            if report is not None:
                self._came.setdefault(place, (self._looked, ended))
        self._looked = began
        return reports

    def first(self, reports: Reports, own: int, here: Iterable[Failure]) -> Failure | None:
        """The first failure, as `first_failure` has it, with the time that its host has told.

        Args:
            reports: as `look` has given them.
            own: this host's place among them.
            here: what this host has found besides.
        """
        found = [(failure, failure) for failure in here]
        for place, report in enumerate(reports):
            if report is not None and report.failure is not None:
                moved = report.failure if place == own else self._by_this_clock(place, report, report.failure)
                found.append((moved, report.failure))
        first = first_failure(moved for moved, _ in found)
        return next((told for moved, told in found if moved is first), None)

    def _by_this_clock(self, place: int, report: Report, failure: Failure) -> Failure:
        earliest, latest = (moment - report.age_seconds for moment in self._came[place])
        return replace(failure, time=min(max(failure.time, earliest), latest))
