"""Ruling: what has been found of a hang, and what follows; of several hosts it is the leader's, and holds for all."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, final

from allranks.failure import Failure
from allranks.verdict import Verdict


@final
@dataclass(frozen=True, slots=True)
class Ruling:
    """One verdict.

    Attributes:
        ranks: who is in the way.
        step: the last that any rank had done.
        marks: rank -> its `Row.mark` when it was looked at, of those that were late.
        slow: whether it is only told of yet: loading may take longer.
        failure: for which the workers of all hosts are ended; None: nobody is.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    step: int
    marks: Mapping[int, int] = field(default_factory=dict)
    slow: bool = False
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
