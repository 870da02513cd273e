"""Statement: where one host's workers stand, as it tells the leader; and what all statements together say. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from allranks.config_guard import GuardConfig
from allranks.surviving.evidence import Testimony
from allranks.surviving.hang import Absentee
from allranks.surviving.hosts.table import Table, host_of
from allranks.surviving.monitor import Alarm, find_silent


@final
@dataclass(frozen=True, slots=True)
class Statement:
    """What one host says of its living workers.

    Attributes:
        found: of each of them.
        stopped: the ranks that have been stopped for too long.
        delayed_seconds: what is left out of the silence of all of them, because one had no core.
    """

    found: tuple[Testimony, ...] = ()
    stopped: tuple[int, ...] = ()
    delayed_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        found = [one.to_json() for one in self.found]
        return {"found": found, "stopped": list(self.stopped), "delayed_seconds": self.delayed_seconds}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], host: str) -> "Statement":
        """What `to_json` gave on `host`."""
        found = tuple(Testimony.from_json(one, host) for one in value["found"])
        return cls(found, tuple(value["stopped"]), value["delayed_seconds"])


def gather(statements: Sequence[Statement | None]) -> list[Testimony]:
    """All testimonies. Who waits for a worker without a core, on whichever host, is not silent for that time."""
    heard = [one for one in statements if one is not None]
    delayed = max((one.delayed_seconds for one in heard), default=0.0)
    found = []
    for statement in heard:
        more = delayed - statement.delayed_seconds
        for one in statement.found:
            quiet = max(0.0, one.row.quiet_seconds - more)
            found.append(replace(one, row=replace(one.row, quiet_seconds=quiet)))
    return sorted(found, key=lambda one: one.row.rank)


def find_alarm(found: Sequence[Testimony], statements: Sequence[Statement | None], guard: GuardConfig) -> Alarm | None:
    """What is wrong by the rules of one host, applied to the workers of all; None: nothing."""
    stopped = tuple(rank for one in statements if one is not None for rank in one.stopped)
    if stopped:
        return Alarm("stopped", stopped, guard.stopped_seconds, act=True)
    return find_silent([one.row for one in found], guard)


def find_absent(table: Table, statements: Sequence[Statement | None]) -> dict[int, Absentee]:
    """All ranks of a round of which nobody testifies; None for a host: it has said nothing."""
    absent: dict[int, Absentee] = {}
    for place, (node, statement) in enumerate(zip(table.members, statements, strict=True)):
        here = set() if statement is None else {one.row.rank for one in statement.found}
        ended = statement is not None
        absent |= {rank: Absentee(host_of(node), node.pid, ended) for rank in table.ranks(place) if rank not in here}
    return absent
