"""docs/reference/faults.md from tools/faults.toml: what allranks does about each fault, and the test that shows it."""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.full_record import Results, kept_results

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
CASES = "bench/results/full_cases.json"
"""How many cases each of the table's tests has; `python -m tools.full_results` counts them."""
NOT_RUN = "no result is kept"
SHOWN = ("yes", "in part", NOT_RUN, "no")
TIMES = {
    "restart_seconds": "",
    "gone_seconds": " until all are gone",
    "verdict_seconds": " until it is told",
    "join_seconds": " until it takes part",
    "replaced_seconds": " with the start of another host",
}
"""What tests tell with `record_property`, in seconds, and how a row says what they are."""


@dataclass(frozen=True)
class Shown:
    """One test of a row, from `FILE::FUNCTION[CASE] @ POINT, POINT`.

    Attributes:
        function: `FILE::FUNCTION`.
        case: the first of its arguments, as pytest writes them; "": all cases.
        points: of a trial that breaks a run at many points, those that the row is about; (): all.
    """

    function: str
    case: str = ""
    points: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Shown":
        """From the table."""
        test, _, points = text.partition(" @ ")
        function, _, case = test.removesuffix("]").partition("[")
        return cls(function, case, tuple(points.split(", ")) if points else ())

    def __str__(self) -> str:
        case = f"[{self.case}]" if self.case else ""
        at = f" at {', '.join(self.points)}" if self.points else ""
        return f"`{self.function.removeprefix('tests/')}{case}`{at}"

    def is_of(self, node_id: str) -> bool:
        """Whether a test that ran is this one, or a case of it."""
        function, _, arguments = node_id.removesuffix("]").partition("[")
        return function == self.function and (not self.case or f"{arguments}-".startswith(f"{self.case}-"))

    def seconds(self, measured: Mapping[str, Any], time: str) -> list[float]:
        """What such a result tells of one of TIMES: at this test's points alone, where it has some."""
        if not self.points:
            return [measured[time]] if time in measured else []
        at: Mapping[str, float] = measured.get("seconds_at", {}) if time == "restart_seconds" else {}
        return [at[point] for point in self.points if point in at]


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        what: the fault.
        does: what allranks does about it; "" where nothing is built.
        tests: what shows it.
        times: which of TIMES its tests tell of it.
        open: what is not shown, and why.
    """

    number: int
    what: str
    does: str = ""
    tests: tuple[Shown, ...] = ()
    times: tuple[str, ...] = ("restart_seconds",)
    open: str = ""


@dataclass(frozen=True)
class Cases:
    """Of one test's cases, how many have a kept result.

    Attributes:
        passed: at least one.
        all: 0: nobody has counted them, so nobody knows whether that is all.
    """

    passed: int
    all: int

    def __str__(self) -> str:
        return f"{self.passed} of {self.all or 'an unknown number of'} cases"

    @property
    def whole(self) -> bool:
        """Whether that is every one."""
        return self.all > 0 and self.passed >= self.all


@dataclass(frozen=True)
class Record:
    """What is kept of a row's tests.

    Attributes:
        kept: those of which a result is kept, of all cases or of some.
        seconds: by the name of TIMES, the longest that was told.
    """

    kept: Mapping[Shown, Cases]
    seconds: Mapping[str, float]

    @property
    def passed(self) -> list[Shown]:
        """Those of which all cases are."""
        return [test for test, cases in self.kept.items() if cases.whole]


def read_faults(path: Path = TABLE) -> list[Fault]:
    """The rows, by number."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    found = [Fault(**{**row, "tests": tuple(map(Shown.parse, row.get("tests", ())))}) for row in rows]
    return [replace(fault, times=tuple(fault.times)) for fault in found]


def named_tests() -> list[Shown]:
    """Every test of the table once, whatever the points that a row is about."""
    return sorted({replace(test, points=()) for fault in read_faults() for test in fault.tests}, key=str)


def count_cases(node_ids: Iterable[str]) -> dict[str, int]:
    """Each of the table's tests, as the page names it, with how many of these are cases of it."""
    found = list(node_ids)
    return {str(test): sum(map(test.is_of, found)) for test in named_tests()}


def counted_cases() -> Mapping[str, int]:
    """As they are kept with the source."""
    counted: dict[str, int] = json.loads((ROOT / CASES).read_text(encoding="utf-8"))
    return counted


def look_up(fault: Fault, results: Results, counted: Mapping[str, int]) -> Record:
    """What the full run that is kept tells of a fault.

    Args:
        counted: how many cases a test has, by its name on the page.
    """
    kept, seconds = dict[Shown, Cases](), dict[str, float]()
    for test in fault.tests:
        mine = [result["measured"] for name, result in results.items() if test.is_of(name)]
        # Of a trial that did not hit its points nothing is known here.
        hit = [told for told in mine if not test.points or {*test.points} & {*told.get("seconds_at", {})}]
        if hit:
            kept[test] = Cases(len(mine), counted.get(str(replace(test, points=())), 0))
        for time in fault.times:
            for told in (second for measured in hit for second in test.seconds(measured, time)):
                seconds[time] = max(told, seconds.get(time, 0.0))
    return Record(kept, {time: seconds[time] for time in fault.times if time in seconds})


def is_shown(fault: Fault, record: Record) -> str:
    """Whether tests that passed show all of it, a part, or nothing: one of SHOWN."""
    if not fault.tests:
        return SHOWN[3]
    if not record.kept:
        return SHOWN[2]
    return SHOWN[1] if fault.open or len(record.passed) < len(fault.tests) else SHOWN[0]


def count_passed(fault: Fault, record: Record) -> str:
    """The cell that says of how many of a row's tests all cases have passed."""
    missing, partly = len(fault.tests) - len(record.kept), len(record.kept) - len(record.passed)
    told = [f"{len(record.passed)} of {len(fault.tests)}"]
    told += [f"of {partly} some cases"] if partly else []
    told += [f"{missing} {NOT_RUN}"] if missing else []
    return "; ".join(told)


def name_test(test: Shown, record: Record) -> str:
    """A line of the list below the table."""
    cases = record.kept.get(test)
    if cases is None:
        return f"{test} ({NOT_RUN})"
    return f"{test}" if cases.whole else f"{test} ({cases})"


def render_faults(results: Results | None = None, counted: Mapping[str, int] | None = None) -> str:
    """The page without its note; `results` and `counted` are those that are kept of the last full run."""
    faults = read_faults()
    results = kept_results(ROOT) if results is None else results
    counted = counted_cases() if counted is None else counted
    rows = [(fault, look_up(fault, results, counted)) for fault in faults]
    lines = [*_introduction(rows, results), "", "| | fault | what allranks does | shown | passed | seconds | open |"]
    lines.append("|---|---|---|---|---|---|---|")
    for fault, record in rows:
        seconds = "; ".join(f"{seconds:.1f}{TIMES[time]}" for time, seconds in record.seconds.items())
        told = (is_shown(fault, record), count_passed(fault, record), seconds, fault.open)
        lines.append(f"| {' | '.join((str(fault.number), fault.what, fault.does, *told))} |")
    lines += ["", "## The tests that show it", ""]
    for fault, record in rows:
        tests = "<br>".join(name_test(test, record) for test in fault.tests)
        lines += [f"**{fault.number}**: {tests}", ""] if tests else []
    return "\n".join(lines)


def _introduction(rows: Sequence[tuple[Fault, Record]], results: Results) -> list[str]:
    """What the page says above its table."""
    shown = [is_shown(fault, record) for fault, record in rows]
    whole, part, not_run, none = (shown.count(word) for word in SHOWN)
    lacking = sum(len(record.kept) < len(fault.tests) for fault, record in rows)
    partly = sum(len(record.kept) - len(record.passed) for _, record in rows)
    commits = ", ".join(sorted({str(result["at"]) for result in results.values()}))
    kept = f", of commit {commits}" if results else ", which is empty: none is kept"
    return [
        f"Of {len(rows)} faults, tests that passed show {whole} as they stand here and {part} in part. Of {not_run} no "
        f"test's result is kept, and {none} have no test. That is by the last full run as far as it is kept "
        f"(`bench/results/full.json`: {len(results)} tests{kept}). `passed` says of how many of a row's tests the "
        f"results of all cases are kept. Of {lacking} rows some test's result is not (`{NOT_RUN}`), and of {partly} "
        f"{'test' if partly == 1 else 'tests'} that of some cases: they failed, were skipped, or were not run. Such "
        "rows are shown in part at most. `open` says what no test shows.",
        "",
        "`seconds` are the longest that a test of the row told there, beside other tests on two cores: where nothing "
        "else is said those that its training lost, from the last finished step before a fault to the first one after "
        "it. Tests of what hangs have limits of 1 to 4 s, so that they end soon (`guard.hang_seconds=3`, "
        "`guard.stopped_seconds=1` or `2`, `guard.input_seconds=4`): a run's own are at least 15 s, 10 s and 600 s. "
        "Rows without a figure are about no recovery, or their tests have told none yet.",
    ]
