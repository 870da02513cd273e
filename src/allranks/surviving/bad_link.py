"""Tells, once, of the bad ways to other hosts that this host's workers have found (observing/bad_links.py).

Nothing follows: what was lost is sent again, and the run is still right.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from allranks.failure import log_file
from allranks.observing.bad_links import Finding, findings_file, read_findings
from allranks.observing.heartbeat import BAD_LINKS
from allranks.surviving.beats import SharedBeats
from allranks.surviving.monitor import Row
from allranks.verdict import Verdict

NEXT = (
    "look at the cables, ports and switch between the two (`ip -s link`, `ethtool -S`) and at what else uses them, or "
    "leave that host out; where the network is meant to be like this, layout.local_sgd, layout.ddp_hook and more "
    "samples a step send less"
)


@final
class BadLink:
    """Looks for what one host's workers have found, over all attempts.

    Args:
        beats: where they show themselves, and how much they have found.
        logs: the folder with the ranks' logs, beside which they write what it is.
    """

    def __init__(self, beats: SharedBeats, logs: Path) -> None:
        self._beats, self._logs = beats, logs
        self._told: set[tuple[str, str, str]] = set()
        self._read: dict[int, int] = {}

    def begin_attempt(self) -> None:
        """Workers are about to be started: what was told stays told."""
        self._read = {}

    def look(self, rows: Sequence[Row], places: Mapping[int, int]) -> Verdict | None:
        """What is new of what they have found; arguments as of `SlowRank.look`."""
        new: dict[tuple[str, str, str], Finding] = {}
        for row in rows:
            number = self._beats.slot(places[row.rank])[BAD_LINKS]
            if number <= self._read.get(row.rank, 0):
                continue
            self._read[row.rank] = number
            for one in read_findings(findings_file(log_file(self._logs, row.rank))):
                if (key := (one.here, one.there, one.fault)) not in self._told:
                    new.setdefault(key, one)
        self._told |= new.keys()
        return explain(list(new.values())) if new else None


def explain(findings: Sequence[Finding]) -> Verdict:
    """The verdict on what was found together."""
    ways: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        ways.setdefault((one.here, one.there), []).append(one)
    lines = [f"from {here} to {there}: {'; '.join(one.what for one in some)}" for (here, there), some in ways.items()]
    more = f" ({len(lines)} ways in all)" if len(lines) > 1 else ""
    evidence = (next(iter(ways.values()))[0].beside, *lines[1:])
    return Verdict("network", f"the network is bad {lines[0]}{more}", evidence, NEXT)
