"""Tells, once, of the bad ways to other hosts that this host's workers have found (observing/bad_links.py).

Nothing follows: what was lost is sent again, and the run is still right.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from allranks.observing.bad_links import LOOK_SECONDS, Finding, findings_file, read_findings
from allranks.surviving.monitor import Row
from allranks.verdict import Verdict

NEXT = (
    "look at the cables, ports and switch between the two (`ip -s link`, `ethtool -S`), or leave that host out; where "
    "the network is meant to be like this, layout.local_sgd, layout.ddp_hook and more samples a step send less"
)


@final
class BadLink:
    """Looks for what one host's workers have found, over all attempts.

    Args:
        logs: the folder with the ranks' logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._told: set[tuple[str, str, str]] = set()
        self._next = 0.0

    def begin_attempt(self) -> None:
        """Workers are about to be started: what was told stays told."""
        self._next = time.monotonic() + LOOK_SECONDS

    def look(self, rows: Sequence[Row], places: Mapping[int, int]) -> Verdict | None:
        """What is new of what they have found.

        Args:
            rows, places: as of `SlowRank.look`; where a worker is does not matter.
        """
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + LOOK_SECONDS
        new: dict[tuple[str, str, str], Finding] = {}
        for row in rows:
            for one in read_findings(findings_file(self._logs / f"rank-{row.rank:05d}.log")):
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
