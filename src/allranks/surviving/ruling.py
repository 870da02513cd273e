"""Ruling: what has been found of a hang, and what follows; of several hosts it is the leader's, and holds for all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
        slow: whether it is only told of yet: loading may take longer.
        failure: for which the workers of all hosts are ended; None: nobody is.
    """

    verdict: Verdict
    ranks: tuple[int, ...]
    step: int
    slow: bool = False
    failure: Failure | None = None

    @property
    def about(self) -> tuple[object, ...]:
        """What has been found, without how long it has been so."""
        return self.verdict.kind, self.ranks, self.step, self.slow

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Ruling":
        """What `to_json` gave, on whichever host."""
        told, failure = value["verdict"], value["failure"]
        verdict = Verdict(told["kind"], told["what"], tuple(told["evidence"]), told["next"])
        ended = None if failure is None else Failure(**failure)
        return cls(verdict, tuple(value["ranks"]), value["step"], value["slow"], ended)
