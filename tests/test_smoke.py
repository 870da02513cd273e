"""The smoke subset: which tests it is."""

import pytest

from tests import smoke
from tests.smoke import CASES, NOTHING_NAMED, ROOMS, is_case, is_smoke, nothing_named


def test_brackets_stand_for_themselves_and_a_star_for_anything() -> None:
    assert is_case("tests/a.py::test[cp=2-[0]]", "tests/a.py::test[cp=2-[0]]")
    assert is_case("tests/a.py::test[cp=2-ring]", "tests/a.py::test[*-ring]")
    assert not is_case("tests/a.py::testc", "tests/a.py::test[cp]")


def test_alone_it_is_the_rooms_that_call_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "CASES", ("tests/cli/test_running.py::*",))
    assert is_smoke("tests/parallel/test_norm.py::test_of_shards", ["parametrize"])
    assert not is_smoke("tests/parallel/test_norm.py::test_of_shards", ["distributed"])
    assert not is_smoke("tests/parallel/test_norm.py::test_of_shards", ["full"])
    assert not is_smoke("tests/planning/test_search.py::test_all", [])
    assert is_smoke("tests/cli/test_running.py::test_a_run", ["distributed"])
    assert not is_smoke("tests/cli/test_running.py::test_a_run", ["distributed", "full"])


def test_what_names_nothing_is_found() -> None:
    """The next test asks the same of the whole suite; here, that it would see it."""
    assert nothing_named([case.replace("*", "x") for case in CASES]) == []
    assert nothing_named([case.replace("*", "x") for case in CASES[1:]]) == [CASES[0]]


def test_everything_named_is_a_test(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[NOTHING_NAMED] == [], "tests/smoke.py names what is no test (any more)"


def test_every_axis_and_room_has_its_part() -> None:
    named = " ".join(CASES)
    for axis in ("ddp", "fsdp", "hsdp", "optimizer", "tp", "pp", "cp=2", "ep=2", "[*x2]", "restart"):
        assert axis in named
    assert {"parallel", "stepping", "training", "checkpointing", "data"} <= set(ROOMS)
