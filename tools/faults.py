"""docs/reference/faults.md from tools/faults.toml: what allranks does about each fault, and the test that shows it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.full_record import Results, kept_results

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
SHOWN = ("yes", "in part", "no")
NOT_RUN = "not run on this source"


@dataclass(frozen=True)
class Fault:
    """One row.

    Attributes:
        what: the fault.
        does: what allranks does about it; "" where nothing is built.
        tests: `file::function`.
        open: what is not shown, and why.
    """

    number: int
    what: str
    does: str = ""
    tests: tuple[str, ...] = ()
    open: str = ""

    @property
    def shown(self) -> str:
        """Whether tests show all of it, a part, or nothing."""
        return SHOWN[2] if not self.tests else SHOWN[1] if self.open else SHOWN[0]


def read_faults(path: Path = TABLE) -> list[Fault]:
    """The rows, by number."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**row, "tests": tuple(row.get("tests", ()))}) for row in rows]


def measured(fault: Fault, results: Results) -> tuple[int, float | None]:
    """(How many of a fault's tests passed in the full run that is kept, each set of arguments counted; seconds).

    The seconds are from the last finished step before a fault to the first one after it, the longest that its tests
    told; None where none of them tells any.
    """
    mine = [result for name, result in results.items() if name.partition("[")[0] in fault.tests]
    told = [result["measured"]["restart_seconds"] for result in mine if "restart_seconds" in result["measured"]]
    return len(mine), max(told, default=None)


def render_faults(results: Results | None = None) -> str:
    """The page without its note; `results` are those that are kept of the last full run."""
    faults = read_faults()
    results = kept_results(ROOT) if results is None else results
    counts = {word: sum(fault.shown == word for fault in faults) for word in SHOWN}
    commits = ", ".join(sorted({str(result["at"]) for result in results.values()}))
    kept = f", of commit {commits}" if results else ", which is empty: none is kept"
    lines = [
        f"Of {len(faults)} faults, tests show {counts['yes']} as they stand here and {counts['in part']} in part; "
        f"shown by none: {counts['no']}. `passed` counts the tests, each set of arguments for itself, that passed "
        f"in the last full run, as far as it is kept (`bench/results/full.json`: {len(results)} tests{kept}); "
        f"`{NOT_RUN}` stands where that has none of a row. "
        "`seconds` are those that its training lost: from the last finished step before a fault to the first one "
        "after it, the longest that a test of the row told there, beside other tests on two cores.",
        "",
        "| | fault | what allranks does | shown | passed | seconds | open |",
        "|---|---|---|---|---|---|---|",
    ]
    for fault in faults:
        passed, seconds = measured(fault, results)
        count = passed or (NOT_RUN if fault.tests else "")
        figures = f"{count} | {'' if seconds is None else f'{seconds:.1f}'}"
        lines.append(f"| {fault.number} | {fault.what} | {fault.does} | {fault.shown} | {figures} | {fault.open} |")
    lines += ["", "## The tests that show it", ""]
    for fault in faults:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
        lines += [f"**{fault.number}**: {tests}", ""] if tests else []
    return "\n".join(lines)
