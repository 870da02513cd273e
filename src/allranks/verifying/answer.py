"""The answer of `allranks verify`: equal, different or not to be verified; in words and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import final

from allranks.verdict import Verdict
from allranks.verifying.assembly import Places, compare_parts
from allranks.verifying.evidence import Evidence, few
from allranks.verifying.findings import Finding
from allranks.verifying.recording import OneDevice, RunRecord
from allranks.verifying.start_causes import places_of
from allranks.verifying.world_view import WorldView

EQUAL, DIFFERS, UNKNOWN = 0, 1, 3
ROUNDING = 1e-6
"""Of a tensor's largest value: what in float64 is further off, and equal, is all rounding, as the gradient of a key's
bias, which is 0, and what Adam makes of it."""
UNVERIFIED = "unverified"
COMPARED = ("raw", "gradients", "parameters", "buffers")
BESIDE = "beside that (a resume and an evaluation are judged where all steps are equal):"
ALONE_SHOW = "with one device nothing is compared; what the ranks show without it:"


@final
@dataclass(frozen=True)
class Answer:
    """What was found out.

    Attributes:
        findings: what differs; empty where nothing does.
        one: one device; None where it could not be verified.
        ranks: the ranks.
        world: which of them see the same samples.
        unverified: why nothing can be said; None where something can.
        notes: what was checked beside, in words.
        shrunk: how the model was made smaller, and why; "" where it has its full size.
        equal_steps: where something differs, in how many first steps the tensors of a kind ("raw", "gradients", ...)
            are equal nevertheless.
        noise: that one device does not compute the same twice, so that nothing but the findings was judged.
    """

    findings: tuple[Finding, ...] = ()
    one: OneDevice | None = None
    ranks: Sequence[RunRecord] = ()
    world: WorldView | None = None
    unverified: Verdict | None = None
    notes: tuple[str, ...] = ()
    shrunk: str = ""
    equal_steps: Mapping[str, int] = field(default_factory=dict)
    noise: Verdict | None = None

    @property
    def equal(self) -> bool:
        """Whether the ranks compute what one device computes."""
        return self.unverified is None and not self.findings

    @property
    def exit_code(self) -> int:
        """0 equal, 1 differs, 3 could not be verified."""
        return UNKNOWN if self.unverified is not None else DIFFERS if self.findings else EQUAL

    def to_json(self) -> dict[str, object]:
        """{equal, verdicts, ...}; equal is null where it could not be verified."""
        if self.unverified is not None:
            verdict = {**self.unverified.to_json(), "tensor": "", "axis": "", "factor": ""}
            return {"equal": None, "verdicts": [verdict], "notes": [*self._size(), *self.notes]}
        return {
            "equal": self.equal,
            "verdicts": [finding.to_json() for finding in self.findings],
            "notes": [*self._noise(), *self._size(), *self.notes, *self._errors()],
        }

    def __str__(self) -> str:
        """Verdict first, evidence second, next move third."""
        if self.unverified is not None:
            return "\n".join([f"could not be verified: {self.unverified}", *(f"  {line}" for line in self._size())])
        beside = [f"  {line}" for line in (*self.notes, *self._errors())]
        size = [f"  {line}" for line in self._size()]
        if not self.findings:
            return "\n".join([self._heading("equal"), *size, *beside])
        told = [str(finding.verdict) for finding in self.findings]
        if self.noise is not None:
            return "\n".join([str(self.noise), *size, ALONE_SHOW, *told])
        return "\n".join([self._heading("differs"), *size, *told, BESIDE, *beside] if beside else
                         [self._heading("differs"), *size, *told])  # fmt: skip

    def _heading(self, word: str) -> str:
        number = 0 if self.world is None else self.world.size
        steps = 0 if self.one is None else len(self.one.run.steps)
        verb = "compute what one device computes" if word == "equal" else "compute something else than one device"
        return f"{word}: {number} processes {verb}, over {steps} steps"

    def _size(self) -> tuple[str, ...]:
        return (self.shrunk,) if self.shrunk else ()

    def _noise(self) -> tuple[str, ...]:
        return () if self.noise is None else (f"{self.noise.what}: nothing but this was judged", *self.noise.evidence)

    def _errors(self) -> list[str]:
        """To what error which tensors are equal, and in which steps where not in all."""
        if self.one is None or self.noise is not None or not self.ranks or self.one.lowered is not None:
            return []
        told, places = [], places_of(self.one.run, self.ranks)
        for what in COMPARED:
            steps = self.equal_steps.get(what, 0) if self.findings else None
            errors = largest_errors(self.one, self.ranks, what, places, steps)
            moved = [tensor for tensor, error in errors.items() if error > ROUNDING]
            if errors:
                clear = [error for error in errors.values() if error <= ROUNDING]
                far = f" to {max(clear):.2g} of each tensor's largest value" if clear else ""
                name = "gradients before clipping" if what == "raw" else what
                some = "" if steps is None or steps >= len(self.one.run.steps) else f" in the first {steps} steps"
                some = " in the first step" if some and steps == 1 else some
                word = "but" if clear else "as far as can be told"
                beside = f", {word} for {few(moved)}, which rounding moves as far on one device" if moved else ""
                told.append(f"{name}: equal{some}{far}{beside}")
        return told


def equal_steps(evidence: Evidence) -> dict[str, int]:
    """In how many first steps the tensors of each kind are equal."""

    def is_equal(step: int, what: str) -> bool:
        return all(m.missing and (what == "buffers" or m.size == 0.0) for m in evidence.compare(step, what))

    steps = range(evidence.num_steps)
    return {what: sum(takewhile(bool, (is_equal(step, what) for step in steps))) for what in COMPARED}


def largest_errors(
    one: OneDevice,
    ranks: Sequence[RunRecord],
    what: str,
    places: Places | None = None,
    steps: int | None = None,
) -> dict[str, float]:
    """Tensor -> its largest relative error over the first steps, or all; {} where there is nothing to compare."""
    found: dict[str, float] = {}
    for index, step in enumerate(one.run.steps[:steps]):
        parts = [getattr(run.steps[index], what) for run in ranks]
        expected = getattr(step, what)
        for name, part in expected.items():
            size = float(part.value.abs().max()) if part.value.numel() else 0.0
            held = [p[name] for p in parts if name in p]
            if not held or not size:
                continue
            off = compare_parts(parts, {name: part}, (), places or {}, relative=-1.0, floor=-1.0)
            errors = [m.relative for m in off if math.isfinite(m.relative)]
            found[name] = max([*errors, found.get(name, 0.0)])
    return found


def cannot(what: str, evidence: str, next: str) -> Answer:
    """An answer that says why nothing can be said."""
    return Answer(unverified=Verdict(UNVERIFIED, what, tuple(evidence.splitlines()), next))
