"""Two runs beside each other: from which step on they are not the same, and which keys of their configs differ.

What is compared is what a step's line in rank 0's journal says. Runs may lie in other directories, have other layouts,
and one may be longer than the other: only steps that both have made are compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, final

from allranks.config import changed_keys
from allranks.reporting.history import Event, number
from allranks.reporting.plain import as_json
from allranks.run import Run

LIMITS = (0.0, 1e-6, 1e-2)
"""Relative differences of a loss that are looked for: none at all, more than rounding in float32, and one to see."""

NUMBERS = ("samples", "lr", "loss", "grad_norm")


@final
@dataclass(frozen=True, slots=True)
class Parting:
    """The first step in which two runs tell something else.

    Attributes:
        what: the field of the step's line.
        limit: by more than which relative difference; 0: at all.
        first, second: what either says.
    """

    what: str
    limit: float
    step: int
    first: float | str
    second: float | str


@final
@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """What two runs have in common.

    Attributes:
        num_steps: that both have made; the last of them is `last_step`, 0 where there is none.
        partings: in the order of the steps; empty where all that was compared is the same.
        config: full key -> (in the first, in the second), for keys that differ.
        tasks: (of the first, of the second) where they are runs of two, each by its file, or as it was named; else ().
    """

    first: str
    second: str
    num_steps: int
    last_step: int
    partings: tuple[Parting, ...]
    config: Mapping[str, tuple[object, object]]
    tasks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values; a number that is not finite becomes its name ("nan")."""
        plain = as_json(asdict(self))
        assert isinstance(plain, dict)
        return plain

    def render(self) -> str:
        """In words: where they part, then why that may be."""
        lines = [f"first   {self.first}", f"second  {self.second}", ""]
        if self.tasks:
            lines.append(f"They are runs of two Tasks: {self.tasks[0]} and {self.tasks[1]}.")
        if not self.num_steps:
            lines.append("There is no step that both have made.")
        elif not self.partings:
            lines.append(f"The {self.num_steps} steps that both have made are the same, up to step {self.last_step}.")
        for parting in self.partings:
            by = f" by more than {parting.limit:g} of it" if parting.limit else ""
            lines.append(
                f"{parting.what} parts{by} at step {parting.step}: {_told(parting.first)} in the first, "
                f"{_told(parting.second)} in the second"
            )
        if self.config:
            lines += ["", "Keys that differ:"]
            lines += [f"  {key}: {_told(one)} -> {_told(other)}" for key, (one, other) in self.config.items()]
        return "\n".join(lines)


def compare_runs(first: Run, second: Run) -> ComparedRuns:
    """What two runs have in common, in whatever state a crash left them. ConfigError: a config.toml is broken."""
    ours, theirs = ({int(step["step"]): step for step in run.steps()} for run in (first, second))
    steps = sorted(ours.keys() & theirs.keys())
    pairs = [(step, ours[step], theirs[step]) for step in steps]
    found = [parting for limit in LIMITS if (parting := _part("loss", limit, pairs)) is not None]
    found += [parting for what in NUMBERS if what != "loss" and (parting := _part(what, 0.0, pairs)) is not None]
    ledger = next((_ledgers(pair) for pair in pairs if _ledgers(pair)), None)
    found += [ledger] if ledger is not None else []
    return ComparedRuns(
        first=str(first.path),
        second=str(second.path),
        num_steps=len(steps),
        last_step=steps[-1] if steps else 0,
        partings=tuple(sorted(found, key=lambda parting: (parting.step, parting.limit))),
        config=changed_keys(first.config(), second.config()),
        tasks=(first.task, second.task) if first.task != second.task else (),
    )


def _part(what: str, limit: float, pairs: Sequence[tuple[int, Event, Event]]) -> Parting | None:
    for step, one, other in pairs:
        a, b = number(one, what), number(other, what)
        if a is not None and b is not None and _differ(a, b, limit):
            return Parting(what, limit, step, a, b)
    return None


def _differ(a: float, b: float, limit: float) -> bool:
    if not (isfinite(a) and isfinite(b)):
        return str(a) != str(b)
    return abs(a - b) > limit * max(abs(a), abs(b))


def _ledgers(pair: tuple[int, Event, Event]) -> Parting | None:
    step, one, other = pair
    a, b = one.get("ledger"), other.get("ledger")
    both = isinstance(a, str) and isinstance(b, str)
    return Parting("ledger", 0.0, step, str(a), str(b)) if both and a != b else None


def _told(value: object) -> str:
    return "not set" if value is None else f"{value:.9g}" if isinstance(value, float) else str(value)
