"""How `allranks dryrun` ends."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.cli import rehearsing
from allranks.cli.rehearsed_question import Asked
from allranks.cli.rehearsing import answer, exit_code
from allranks.errors import ConfigError
from allranks.rehearsal import Finding
from tests.test_rehearsal import rank, rehearsal


def test_exit_codes() -> None:
    assert exit_code(rehearsal()) == 0
    assert exit_code(rehearsal(rank(0, 950))) == 1
    assert exit_code(replace(rehearsal(), findings=(Finding("hang", "a", "b", fails=True),))) == 1


@pytest.fixture(scope="module", autouse=True)
def dynamo() -> None:
    """Rehearsing imports this, which sets an environment variable: before any test looks."""
    importlib.import_module("torch._inductor.runtime.cache_dir_utils")


@pytest.mark.parametrize("json", [False, True])
def test_the_target_is_checked_first_and_the_result_is_told_before_it_is_written(
    json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        answer(Asked(("no_such.py",), "1x2:cpu", trace=tmp_path))
    monkeypatch.setattr(rehearsing, "question_of", lambda asked: None)
    monkeypatch.setattr("allranks.rehearsing.whole.rehearse", lambda *_: rehearsal())
    monkeypatch.setattr("allranks.durable.sync", lambda path: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert answer(Asked(("a.py",), "1x2:cpu", svg=tmp_path / "a.svg", json=json)) == 2
    told = capsys.readouterr()
    assert told.out.startswith("{") == json and "100b" in told.out
    assert told.err.endswith("a.svg cannot be written: No space left; name another place\n")
