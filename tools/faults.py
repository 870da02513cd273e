"""docs/reference/faults.md from tools/faults.toml: what allranks does about each fault, and the test that shows it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_suffix(".toml")
SHOWN = ("yes", "in part", "no")


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


def render_faults() -> str:
    """The page without its note."""
    faults = read_faults()
    counts = {word: sum(fault.shown == word for fault in faults) for word in SHOWN}
    lines = [
        f"Of {len(faults)} faults, tests show {counts['yes']} as they stand here and {counts['in part']} in part; "
        f"{counts['no']} are shown by none. Times are not measured yet.",
        "",
        "| | fault | what allranks does | shown | test | open |",
        "|---|---|---|---|---|---|",
    ]
    for fault in faults:
        tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in fault.tests)
        lines.append(f"| {fault.number} | {fault.what} | {fault.does} | {fault.shown} | {tests} | {fault.open} |")
    return "\n".join([*lines, ""])
