"""What was learned of a Task, found again by its outline alone."""

import json
import time
from pathlib import Path

import pytest

from allranks.model_profile import ModelProfile
from allranks.profiling import known_tasks
from allranks.profiling.cache import with_digest
from allranks.profiling.known_tasks import FAULT_SECONDS, find_known, keep_known

PROFILE = with_digest(ModelProfile("Words", (), "float32"))
KEY = "0" * 64


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_kept_is_found() -> None:
    kept = keep_known(KEY, {"float32": PROFILE}, "map", 0.25)
    assert find_known(KEY) == kept
    assert (kept.profiles, kept.order, kept.sample_seconds) == ({"float32": PROFILE}, "map", 0.25)
    assert find_known("1" * 64) is None


def test_without_a_key_nothing_is_kept(tmp_path: Path) -> None:
    assert keep_known("", {"float32": PROFILE}).profiles and not list(tmp_path.rglob("*.json"))


def test_a_folder_that_cannot_be_written_costs_the_entry_alone(tmp_path: Path) -> None:
    (tmp_path / "allranks").write_text("a file")
    assert keep_known(KEY, {"float32": PROFILE}).profiles and find_known(KEY) is None


@pytest.mark.parametrize("damage", ["cut", "figure", "key", "code"])
def test_an_entry_that_is_not_as_it_was_made_is_none(tmp_path: Path, damage: str) -> None:
    keep_known(KEY, {"float32": PROFILE})
    (path,) = tmp_path.rglob("*.json")
    entry = json.loads(path.read_text())
    if damage == "figure":
        entry["profiles"]["float32"]["name"] = "Other words"
    if damage == "key":
        entry["key"] = "1" * 64
    if damage == "code":
        entry["files"][known_tasks.__file__] = "of before"
    path.write_text(path.read_text()[:-9] if damage == "cut" else json.dumps(entry))
    assert find_known(KEY) is None


def test_a_fault_is_forgotten_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_known(KEY, {}, fault="it reads a value")
    assert find_known(KEY) == kept
    later = time.time() + FAULT_SECONDS
    monkeypatch.setattr("allranks.profiling.known_tasks.time.time", lambda: later)
    assert find_known(KEY) is None
