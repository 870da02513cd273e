"""The page of faults: ninety rows, and no test in it that does not exist."""

import ast
from pathlib import Path

from tools.faults import read_faults, render_faults

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
