"""Published runs beside their estimates."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from published_models import Row
from published_runs import memory_of, run_of
from row_faults import fault_of

from allranks.errors import ConfigError
from allranks.planning.estimate import Cost, estimate_setting


@dataclass(frozen=True)
class Skipped:
    """A row that is not estimated."""

    name: str
    because: str


@dataclass(frozen=True)
class Judged:
    """A row beside its estimate; a figure that the source does not give is None."""

    row: Row
    cost: Cost
    published_seconds: float | None
    published_bytes: float | None
    predicted_bytes: float

    @property
    def seconds(self) -> float:
        """As predicted."""
        return self.cost.step_seconds.expected

    @property
    def error(self) -> float:
        """Of the step time, relative to the published one."""
        assert self.published_seconds is not None
        return self.seconds / self.published_seconds - 1

    @property
    def memory_error(self) -> float:
        """The same of memory."""
        assert self.published_bytes is not None
        return self.predicted_bytes / self.published_bytes - 1

    @property
    def ran_out(self) -> bool:
        """Whether the source says that it ran out of memory."""
        return bool(self.row["metrics"].get("oom"))

    @property
    def covered(self) -> bool:
        """Whether the published time lies in the 90% interval."""
        span = self.cost.step_seconds
        return self.published_seconds is not None and span.low <= self.published_seconds <= span.high

    @property
    def fits(self) -> bool:
        """As `allranks plan` says it."""
        return self.cost.room.fits


def judge(rows: Iterable[Row]) -> list[Judged]:
    """Every row that says enough to be estimated."""
    return judge_all(rows)[0]


def judge_all(rows: Iterable[Any]) -> tuple[list[Judged], list[Skipped]]:
    """The rows that can be estimated, and the others, each with the reason."""
    judged: list[Judged] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(rows, start=1):
        name = str(row.get("id") or f"row {number}") if isinstance(row, Mapping) else f"row {number}"
        because = fault_of(row)
        if not because:
            try:
                judged.append(judge_one(row))
                continue
            # Whatever is wrong with one row of somebody's file, the others are judged.
            except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, ConfigError) as error:
                because = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        skipped.append(Skipped(name, because))
    return judged, skipped


def judge_one(row: Row) -> Judged:
    """One row beside its estimate. Raises ValueError where it leaves open what an estimate needs."""
    run = run_of(row)
    if run is None:
        raise ValueError("a size, a degree or the batch is open")
    cost = estimate_setting(*run)
    published, predicted = memory_of(row, cost)
    return Judged(row, cost, row["metrics"].get("step_time_s"), published, predicted)
