"""Published runs beside their estimates."""

from collections.abc import Iterable
from dataclasses import dataclass

from published_runs import Row, memory_of, run_of

from allranks.errors import ConfigError
from allranks.planning.estimate import Cost, estimate_setting


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
    judged = []
    for row in rows:
        try:
            run = run_of(row)
        except (
            KeyError,
            TypeError,
            AttributeError,
            ConfigError,
        ):  # a field that every estimate needs is absent, or impossible
            run = None
        if run is None:
            continue
        cost = estimate_setting(*run)
        published, predicted = memory_of(row, cost)
        judged.append(Judged(row, cost, row["metrics"].get("step_time_s"), published, predicted))
    return judged
