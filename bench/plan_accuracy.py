"""How near the planner comes to published runs; fits nothing.

    python bench/plan_accuracy.py FILE [FILE ...] [--json] [--rows]

FILE is of the schema of bench/data/published-runs.json. Prints for each source and in all: rows, mean and median error
of the step time, mean error of memory, rows that ran out of memory and were called a fit, rows that ran and were called
unfit, mean regret of taking the configuration that is predicted to be the fastest of those that were compared, how many
published times lie in the 90% interval, and the interval's median high/low. `--rows` prints predicted beside published
for every row. Which rows calibration used stands in bench/data/calibration-rows.json; fit_constants.py used no others.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_runs import Row, memory_of, rows_of, run_of

from allranks.planning.estimate import Cost, estimate_setting

GIB = float(2**30)


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
        return self.cost.peak_bytes.high <= self.cost.capacity_bytes


def judge(rows: Iterable[Row]) -> list[Judged]:
    """Every row that says enough to be estimated."""
    judged = []
    for row in rows:
        run = run_of(row)
        if run is None:
            continue
        cost = estimate_setting(*run)
        published, predicted = memory_of(row, cost)
        judged.append(Judged(row, cost, row["metrics"].get("step_time_s"), published, predicted))
    return judged


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """The figures of one source, or of all; None where no row gives what a figure needs."""
    timed = [one for one in judged if one.published_seconds]
    weighed = [one for one in judged if one.published_bytes]
    ran = [one for one in judged if not one.ran_out]
    errors = [abs(one.error) for one in timed]
    regrets = regrets_of(judged)
    widths = [one.cost.step_seconds.high / one.cost.step_seconds.low for one in timed]
    return {
        "rows": len(judged),
        "step_mape": statistics.fmean(errors) if errors else None,
        "step_median": statistics.median(errors) if errors else None,
        "step_bias": statistics.fmean(one.error for one in timed) if timed else None,
        "memory_mape": statistics.fmean(abs(one.memory_error) for one in weighed) if weighed else None,
        "memory_rows": len(weighed),
        "false_fits": sum(one.ran_out and one.fits for one in judged),
        "out_of_memory": len(judged) - len(ran),
        "false_refusals": sum(not one.fits for one in ran),
        "mean_regret": statistics.fmean(regrets) if regrets else None,
        "groups": len(regrets),
        "coverage": statistics.fmean(one.covered for one in timed) if timed else None,
        "interval_width": statistics.median(widths) if widths else None,
    }


def regrets_of(judged: Sequence[Judged]) -> list[float]:
    """For every group of competing rows: by how much the one predicted fastest is slower than the fastest."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.published_seconds and one.row.get("rank_group"):
            groups[one.row["rank_group"]].append(one)
    regrets = []
    for group in groups.values():
        if len(group) < 2:
            continue
        taken = min(group, key=lambda one: one.seconds).published_seconds
        best = min(one.published_seconds for one in group if one.published_seconds)
        assert taken is not None
        regrets.append(taken / best - 1)
    return regrets


def by_source(judged: Iterable[Judged]) -> dict[str, list[Judged]]:
    """In the order of the file."""
    sources: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        sources[one.row["source"]].append(one)
    return sources


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for file in arguments.files:
        rows += rows_of(json.loads(file.read_text()))
    judged = judge(rows)
    sources = by_source(judged)
    report = {"sources": {name: summary(rows) for name, rows in sources.items()}, "all": summary(judged)}
    if arguments.json:
        print(json.dumps(report, indent=1))
        return 0
    print_table(report)
    if arguments.rows:
        for one in judged:
            print(one.row["id"], one.published_seconds, round(one.seconds, 4))
    return 0


def print_table(report: Mapping[str, Any]) -> None:
    """One line a source."""
    heads = ("rows", "step_mape", "step_median", "step_bias", "memory_mape", "false_fits", "false_refusals", "mean_regret", "coverage", "interval_width")
    print(f"{'source':<24}" + "".join(f"{name.replace('step_', '').replace('_', ' ')[:12]:>14}" for name in heads))
    for name, figures in [*report["sources"].items(), ("all", report["all"])]:
        print(f"{name:<24}" + "".join(f"{cell(name, figures[name]):>14}" for name in heads))


def cell(name: str, value: float | None) -> str:
    """As a table shows it."""
    if value is None:
        return "-"
    if name in ("rows", "false_fits", "false_refusals"):
        return str(value)
    return f"{value:.2f}" if name == "interval_width" else f"{value:.1%}"


if __name__ == "__main__":
    raise SystemExit(main())
