"""What the ranks of a run's newest attempt have told: where it begins in their logs, and how they say it ended.

Logs and journals go on over all attempts, and a rank that was ended before it came so far has none of the newest one.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

from allranks.reporting.history import split_attempts, whole, word
from allranks.run import Run

_LOG = re.compile(r"rank-(\d{1,9})\.log")


@final
@dataclass(frozen=True, slots=True)
class Part:
    """One rank's in the newest attempt.

    Attributes:
        log_bytes: how long its log was when it began; None: nobody knows.
        reason: how its journal says that it ended (`done`, `stopped`, `failed`); "": it was killed, or goes on.
    """

    log_bytes: int | None
    reason: str


@final
@dataclass(frozen=True, slots=True)
class RankLog:
    """What one rank printed in the newest attempt.

    Attributes:
        begin: its first byte.
        apart: whether all from there on is of that attempt; else of whichever the log has.
    """

    path: Path
    begin: int
    apart: bool


def find_parts(run: Run) -> dict[int, Part]:
    """By rank, of those that have begun in the newest attempt."""
    parts = {}
    for rank in run.ranks():
        attempts = split_attempts(run.events(rank))
        if not attempts or whole(attempts[-1][0], "attempt") < run.attempts:
            continue
        size = attempts[-1][0].get("log_bytes")
        # The supervisor writes behind rank 0's.
        end = next((event for event in attempts[-1] if event["event"] == "end"), {})
        parts[rank] = Part(size if type(size) is int and size >= 0 else None, word(end, "reason"))
    return parts


def find_logs(run: Run, parts: dict[int, Part]) -> list[RankLog]:
    """The logs of the newest attempt, by name; where nothing tells which that is, all of what there is."""
    logs = []
    for path in sorted(path for path in run.log().parent.glob("rank-*.log") if path.is_file()):
        named = _LOG.fullmatch(path.name)
        part = parts.get(int(named[1])) if named is not None else None
        if part is not None and part.log_bytes is not None:
            logs.append(RankLog(path, part.log_bytes, True))
        elif run.attempts <= 1:
            logs.append(RankLog(path, 0, True))
        elif part is not None or not parts:
            logs.append(RankLog(path, 0, False))
    return logs
