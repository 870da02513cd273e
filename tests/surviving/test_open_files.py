"""With too few descriptors nothing starts, and one line says what to do; a soft limit is raised."""

import resource
from pathlib import Path

import pytest

from allranks.errors import ConfigError
from allranks.surviving.open_files import LEAST_FILES, provide_open_files
from tests.commands import POINTS, allranks


@pytest.mark.parametrize(
    ("limits", "becomes"),
    [
        ((32, 4096), LEAST_FILES),
        ((32, resource.RLIM_INFINITY), LEAST_FILES),
        ((1024, 4096), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_limit_is_raised_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], becomes: int | None
) -> None:
    said = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: said.append(new))
    provide_open_files()
    assert said == ([] if becomes is None else [(becomes, limits[1])])


def test_a_limit_that_is_too_low_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    with pytest.raises(ConfigError, match="20 files open here, and training needs 64 or more: say `ulimit -n 1024`"):
        provide_open_files()


def test_the_command_refuses_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    limited = ("prlimit", "--nofile=20:20")
    ran = allranks("train", POINTS, "--nproc", "2", "--run", "run", folder=tmp_path, check=2, launcher=limited)
    (line,) = ran.stderr.splitlines()
    assert line.startswith("allranks: error: a process may have 20 files open here, ")
    assert list(tmp_path.iterdir()) == []
