"""The page of faults: ninety rows, and no test in it that does not exist."""

import ast
from pathlib import Path
from typing import Any

from tools.faults import measured, read_faults, render_faults

ROOT = Path(__file__).parents[1]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_fault_has_a_row() -> None:
    assert [fault.number for fault in read_faults()] == list(range(1, 91))


def test_what_is_not_shown_says_why() -> None:
    assert [fault.number for fault in read_faults() if not fault.tests and not fault.open] == []
    assert [fault.number for fault in read_faults() if fault.tests and not fault.does] == []


def test_the_tests_are_there() -> None:
    for fault in read_faults():
        for test in fault.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file(), (fault.number, file)
            assert name in functions_of(ROOT / file), (fault.number, test)


def test_the_page_counts_what_it_shows() -> None:
    shown = [fault.shown for fault in read_faults()]
    page = render_faults()
    assert f"tests show {shown.count('yes')} as they stand here and {shown.count('in part')} in part" in page
    assert sum(line.startswith("| ") and line[2].isdigit() for line in page.splitlines()) == 90


def test_what_passed_and_the_longest_time_come_from_the_full_run_that_is_kept() -> None:
    fault = next(fault for fault in read_faults() if fault.tests)
    told: list[dict[str, Any]] = [
        {"at": "0123abc", "measured": {}},
        {"at": "0123abc", "measured": {"restart_seconds": 3.25}},
        {"at": "4567def", "measured": {"restart_seconds": 1.0}},
    ]
    results = {f"{fault.tests[0]}[{index}]": result for index, result in enumerate(told)}
    results["tests/test_other.py::test_it"] = {"at": "0123abc", "measured": {"restart_seconds": 99.0}}
    assert measured(fault, results) == (3, 3.25)
    assert measured(fault, {}) == (0, None)
    page = render_faults(results)
    row = next(line for line in page.splitlines() if line.startswith(f"| {fault.number} |"))
    assert " | 3 | 3.2 | " in row and "of commit 0123abc, 4567def)" in page
    without = [one for one in read_faults() if one.tests and not measured(one, results)[0]]
    assert without and page.count("| not run on this source |") == len(without)
