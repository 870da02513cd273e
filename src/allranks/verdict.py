"""An answer in words: what, the evidence, the next move; and a decision with its because."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import final

FINDINGS: Mapping[str, str] = {
    "replicas_differ": "replicas",
    "shards_alike": "shards",
    "samples_wrong": "samples",
    "fed_apart": "samples",
    "fed_alike": "samples",
    "reseeded": "randomness",
    "randomness_wrong": "randomness",
    "optimizer_unlinked": "linkage",
    "rate_moved": "schedule",
    "steps_differ": "steps",
    "checkpoint_unproven": "checkpoint",
    "gradients_differ": "gradients",
}
"""Kind of a verdict -> the sentinel that gives it."""


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """Something the program chose by itself; printed once."""

    what: str
    because: str

    def __str__(self) -> str:
        return f"{self.what}, because {self.because}"


@final
@dataclass(frozen=True, slots=True)
class Verdict:
    """What is the matter (`kind` for programs, `what` for people), how that is known, and what to do next."""

    kind: str
    what: str
    evidence: tuple[str, ...]
    next: str

    def to_json(self) -> dict[str, object]:
        """The same answer as one JSON object."""
        return {**asdict(self), "evidence": list(self.evidence)}

    def __str__(self) -> str:
        """Verdict first, evidence second, next move third; one line each."""
        return "\n".join([self.what, *(f"  {line}" for line in self.evidence), f"  next: {self.next}"])
