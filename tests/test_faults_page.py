"""The page of faults: ninety rows, no test in it that does not exist, and no figure of another test."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allranks.fault_points import POINTS
from tools.faults import (
    NOT_RUN,
    SHOWN,
    TIMES,
    Cases,
    Fault,
    Record,
    Shown,
    count_cases,
    count_passed,
    counted_cases,
    is_shown,
    look_up,
    named_tests,
    read_faults,
    render_faults,
)
from tools.full_results import collect_cases

ROOT = Path(__file__).parents[1]


@cache
def functions_of(path: Path) -> dict[str, str]:
    """Name -> the source of every test in a module, with its decorators."""
    text = path.read_text()
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    lines = text.splitlines()
    starts = {node.name: min([node.lineno, *(line.lineno for line in node.decorator_list)]) - 1 for node in found}
    return {
        node.name: "\n".join(lines[starts[node.name] : node.end_lineno])
        for node in found
        if node.name.startswith("test_")
    }


def result(**measured: Any) -> dict[str, Any]:
    return {"at": "0123abc", "measured": measured}


def fault_of(*tests: str, **fields: Any) -> Fault:
    return Fault(1, "a fault", "what is done", tuple(map(Shown.parse, tests)), **fields)


def test_every_fault_has_a_row() -> None:
    assert [fault.number for fault in read_faults()] == list(range(1, 91))


def test_what_is_not_shown_says_why() -> None:
    assert [fault.number for fault in read_faults() if not fault.tests and not fault.open] == []
    assert [fault.number for fault in read_faults() if fault.tests and not fault.does] == []


def test_the_tests_and_their_cases_are_there() -> None:
    for fault in read_faults():
        assert len(set(fault.tests)) == len(fault.tests) and set(fault.times) <= set(TIMES), fault.number
        for test in fault.tests:
            file, _, name = test.function.partition("::")
            assert (ROOT / file).is_file(), (fault.number, file)
            source = functions_of(ROOT / file).get(name)
            assert source is not None, (fault.number, test)
            case = re.escape(test.case)
            assert not case or re.search(rf'["[ ]{case}["\],]', source), (fault.number, test)
            assert set(test.points) <= set(POINTS) and (not test.points or "record(" in source), (fault.number, test)


def test_a_row_that_is_about_a_time_has_a_test_that_tells_it() -> None:
    for fault in read_faults():
        for time in () if fault.times == ("restart_seconds",) else fault.times:  # as most have it, whatever is told
            sources = [functions_of(ROOT / test.function.partition("::")[0]) for test in fault.tests]
            names = [test.function.partition("::")[2] for test in fault.tests]
            assert any(f'"{time}"' in source[name] for source, name in zip(sources, names, strict=True)), (fault, time)


def test_the_page_counts_what_it_shows() -> None:
    page = render_faults()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    shown = [row[3] for row in rows]
    assert len(rows) == 90 and set(shown) <= set(SHOWN)
    assert f"tests that passed show {shown.count('yes')} as they stand here and {shown.count('in part')} in" in page
    assert f"Of {shown.count(NOT_RUN)} no test's result is kept, and 0 have no test" in page
    assert f"Of {sum(NOT_RUN in row[4] for row in rows)} rows some test's result is not (`{NOT_RUN}`)" in page


def test_a_case_counts_for_its_own_row_alone() -> None:
    results = {
        "tests/test_a.py::test_it[SIGKILL-kinds3]": result(restart_seconds=0.42),
        "tests/test_a.py::test_it[SIGKILLED]": result(restart_seconds=7.0),
        "tests/test_a.py::test_it[lock-kinds5]": result(restart_seconds=5.62),
        "tests/test_b.py::test_it": result(restart_seconds=99.0),
    }
    for case, seconds in (("[SIGKILL]", 0.42), ("[lock]", 5.62), ("", 7.0)):
        told = look_up(fault_of(f"tests/test_a.py::test_it{case}"), results, {})
        assert told.seconds == {"restart_seconds": seconds}
    assert look_up(fault_of("tests/test_a.py::test_it[data]"), results, {}) == Record({}, {})


def test_a_test_counts_only_with_all_of_its_cases() -> None:
    name = "tests/test_a.py::test_it"
    results = {f"{name}[{case}]": result() for case in ("SIGKILL-0", "SIGKILL-1", "lock-0")}
    every = fault_of(name, f"{name}[SIGKILL]")
    shown = list(every.tests)
    record = look_up(every, results, {str(shown[0]): 4, str(shown[1]): 2})
    assert record.kept == {shown[0]: Cases(3, 4), shown[1]: Cases(2, 2)} and record.passed == [shown[1]]
    assert is_shown(every, record) == "in part" and count_passed(every, record) == "1 of 2; of 1 some cases"
    unknown = look_up(every, results, {})
    assert unknown.passed == [] and str(unknown.kept[shown[0]]) == "3 of an unknown number of cases"


def test_all_cases_of_a_trial_count_and_not_those_that_hit_the_points_of_a_row() -> None:
    results = {
        "tests/test_a.py::test_kills[0]": result(seconds_at={"forward": 0.5}),
        "tests/test_a.py::test_kills[1]": result(seconds_at={"backward": 0.5}),
    }
    fault = fault_of("tests/test_a.py::test_kills @ forward")
    assert look_up(fault, results, {"`test_a.py::test_kills`": 2}).passed == [*fault.tests]
    assert look_up(fault, results, {"`test_a.py::test_kills`": 3}).passed == []


def test_cases_are_counted_by_their_first_argument() -> None:
    test = next(test for test in named_tests() if test.case)
    found = [f"{test.function}[{test.case}-{number}]" for number in range(3)]
    counted = count_cases([*found, f"{test.function}[{test.case}x-0]", f"{test.function}_too[{test.case}-0]"])
    assert counted[str(test)] == 3 and set(counted) == set(map(str, named_tests()))


def test_every_test_of_the_table_has_its_cases_counted() -> None:
    counted = counted_cases()
    assert [str(test) for test in named_tests() if not counted.get(str(test))] == [], "python -m tools.full_results"


@pytest.mark.full
def test_the_counts_are_those_of_the_tests_there_are() -> None:
    assert collect_cases() == counted_cases(), "python -m tools.full_results counts them anew"


def test_of_a_trial_with_many_points_a_row_has_the_time_at_its_own() -> None:
    trial = "tests/test_a.py::test_kills"
    results = {
        f"{trial}[0]": result(restart_seconds=9.0, seconds_at={"forward": 0.5, "optimizer": 9.0}),
        f"{trial}[1]": result(restart_seconds=0.7, seconds_at={"forward": 0.7}),
    }
    assert look_up(fault_of(f"{trial} @ forward"), results, {}).seconds == {"restart_seconds": 0.7}
    assert look_up(fault_of(f"{trial} @ forward, optimizer"), results, {}).seconds == {"restart_seconds": 9.0}
    assert look_up(fault_of(f"{trial} @ evaluate"), results, {}) == Record({}, {}), "no trial hit it"
    assert look_up(fault_of(trial), results, {}).seconds == {"restart_seconds": 9.0}


def test_a_row_has_the_times_that_it_is_about() -> None:
    results = {"tests/test_a.py::test_it": result(restart_seconds=16.1, gone_seconds=0.2, other=5)}
    told = look_up(fault_of("tests/test_a.py::test_it", times=("gone_seconds",)), results, {})
    assert told.seconds == {"gone_seconds": 0.2}


@pytest.mark.parametrize(
    ("kept", "open_", "shown"),
    [((), "", NOT_RUN), ((0,), "", "in part"), ((0, 1), "", "yes"), ((0, 1), "x", "in part")],
)
def test_what_passed_says_how_much_is_shown(kept: tuple[int, ...], open_: str, shown: str) -> None:
    fault = fault_of("tests/test_a.py::test_0", "tests/test_a.py::test_1", open=open_)
    results = {f"tests/test_a.py::test_{number}[x]": result() for number in kept}
    record = look_up(fault, results, {"`test_a.py::test_0`": 1, "`test_a.py::test_1`": 1})
    assert len(record.passed) == len(kept) and is_shown(fault, record) == shown
    assert is_shown(fault_of(open="needs a GPU"), record) == "no"


def test_the_page_names_what_was_not_run() -> None:
    fault = next(fault for fault in read_faults() if len(fault.tests) == 3)
    first = fault.tests[0]
    page = render_faults({first.function: result(restart_seconds=3.25)}, {str(first): 1})
    row = next(line for line in page.splitlines() if line.startswith(f"| {fault.number} |"))
    assert f"| 1 of 3; 2 {NOT_RUN} |" in row and "of commit 0123abc)" in page
    listed = next(line for line in page.splitlines() if line.startswith(f"**{fault.number}**"))
    assert listed.count(f"({NOT_RUN})") == 2 and f"{first}<br>" in listed
