"""Ruling: what has been found of a hang, and what follows; of several hosts it is the leader's, and holds for all."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, final

from allranks.config_guard import GuardConfig
from allranks.failure import Failure
from allranks.surviving.monitor import Alarm, Row
from allranks.verdict import Verdict

Slow = Literal["", "input", "checkpoint"]

FOLLOWS = {
    "restart": "all workers are ended now, and start again from the newest checkpoint (guard.hang=restart)",
    "stop": "all workers are ended now, and the run with 93 (guard.hang=stop)",
    "report": "the run goes on as it is (guard.hang=report)",
}


def what_follows(alarm: Alarm, guard: GuardConfig) -> str:
    """What follows of an alarm by the config, in words."""
    if alarm.act:
        return FOLLOWS[guard.hang]
    if alarm.phase == "checkpoint":
        return f"nothing follows yet: a checkpoint may take {guard.checkpoint_seconds:g} s (guard.checkpoint_seconds)"
    return f"nothing follows yet: data may take {guard.input_seconds:g} s (guard.input_seconds)"


@final
@dataclass(frozen=True, slots=True)
class Ruling:
    """One verdict.

    Attributes:
        ranks: who is in the way.
        step: the last that any rank had done.
        marks: rank -> its `Row.mark` when it was looked at, of those that were late.
        slow: what is only told of yet, because it may take longer; "": nothing.
        failure: for which the workers of all hosts are ended; None: nobody is.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    step: int
    marks: Mapping[int, int] = field(default_factory=dict)
    slow: Slow = ""
    failure: Failure | None = None

    @property
    def about(self) -> tuple[object, ...]:
        """What has been found, without how long it has been so."""
        return self.verdict.kind, self.ranks, self.step, self.slow

    def is_outdated(self, rows: Iterable[tuple[int, int, int]]) -> bool:
        """Whether what was found is so no more: the run has gone on since, as far as `rows` tell.

        Args:
            rows: (rank, step, mark), as now, of any of the living ranks. Where one has done a further step, all have:
                none ends without the others. Within a step only who was late says something.
        """
        return any(step > self.step or mark != self.marks.get(rank, mark) for rank, step, mark in rows)

    def goes_on(self, rows: Sequence[Row]) -> Verdict | None:
        """What to say where a wait that was told of has ended, by `rows`; None: it has not, or it was another thing."""
        phase = self.slow or ("input" if self.verdict.kind == "data" else "")
        past = [row.rank for row in rows if row.rank in self.ranks and row.phase != phase]
        if not phase or not (past or any(row.step > self.step for row in rows)):
            return None
        names = ", ".join(map(str, past or self.ranks))
        if phase == "input":
            what, move = f"rank {names} has its data", "see why loading took so long there"
        else:
            what, move = f"rank {names} has its checkpoint behind it", "see what else that disk was busy with"
        return Verdict("goes_on", f"the run goes on: {what}; it was slow and did not hang", (), move)

    def to_json(self) -> dict[str, Any]:
        """One JSON object, whose keys JSON makes texts of."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Ruling":
        """What `to_json` gave, on whichever host."""
        told, failure = value["verdict"], value["failure"]
        verdict = Verdict(told["kind"], told["what"], tuple(told["evidence"]), told["next"])
        ended = None if failure is None else Failure(**failure)
        marks = {int(rank): mark for rank, mark in value["marks"].items()}
        return cls(verdict, tuple(value["ranks"]), value["step"], marks, value["slow"], ended)
