"""Which cases `make test` takes of a function that has many."""

import subprocess
from pathlib import Path

import pytest

from tests import sampling
from tests.sampling import taken
from tests.test_leaks import run_pytest

CASES = [f"tests/a.py::test[{number}]" for number in range(10)]


@pytest.mark.parametrize(("one_in", "number"), [(1, 10), (3, 4), (4, 3), (10, 1), (99, 1)])
def test_one_in_so_many_rounded_up(one_in: int, number: int) -> None:
    assert len(taken(CASES, one_in)) == number
    assert taken(CASES, one_in) == taken(CASES[::-1], one_in), "in whichever order they come"


def test_one_case_more_takes_at_most_one_others_place() -> None:
    before, after = taken(CASES, 3), taken([*CASES, "tests/a.py::test[10]"], 3)
    assert len(before - after) <= 1


def test_what_the_smoke_subset_names_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    others = sorted(set(CASES) - taken(CASES, 5))
    monkeypatch.setattr(sampling, "CASES", tuple(others[:3]))
    assert taken(CASES, 5) == set(others[:3])
    monkeypatch.setattr(sampling, "CASES", tuple(others[:1]))
    assert others[0] in taken(CASES, 5) and len(taken(CASES, 5)) == 2


PROGRAM = """
import pytest

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(6))
def test_many(number): pass

@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_few(number): pass

def test_one(): pass
"""


@pytest.mark.full
def test_what_it_leaves_is_full(tmp_path: Path) -> None:
    first = run_pytest(tmp_path, PROGRAM)
    assert "4 passed, 5 deselected" in first.stdout, first.stdout + first.stderr
    *command, module = first.args
    for words, told in (((f"{module}::test_many[0]",), "1 passed"), ((module, "--full"), "9 passed")):
        ran = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert told in ran.stdout, "who asks for a single case gets it"
