"""Profiles on disk."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from allranks.model_profile import Block, ModelProfile, Operation
from allranks.profiling import cache as cache_module
from allranks.profiling.cache import ProfileCache, cache_folder, have_sources, key_of, with_digest

OPERATIONS = (Operation("query", "matmul", 8.0, (2, 3, 4), parameters=12, cut="column"), Operation("norm", "norm"))
PROFILE = with_digest(
    ModelProfile(
        "Words",
        (Block("layers.*", OPERATIONS, 3, 16.0, repeated=True),),
        "bfloat16",
        tied=(("a", "b"),),
        facts={"peak_bytes": 1.5},
    )
)
KEY = key_of({"some": "model"})


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    found = ProfileCache(tmp_path / "profiles")
    assert found.keep(KEY, PROFILE) == ""
    return found


def test_what_is_kept_is_found(cache: ProfileCache, tmp_path: Path) -> None:
    assert cache.find(KEY) == PROFILE
    assert cache.find(key_of({"another": "model"})) is None
    assert ProfileCache(tmp_path / "elsewhere").find(KEY) is None


@pytest.mark.parametrize("damage", ["cut", "figure", "field", "empty", "other key"])
def test_a_damaged_entry_is_none_and_is_replaced(cache: ProfileCache, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "profiles" / f"{KEY}.json"
    text = path.read_text()
    entry = json.loads(text)
    if damage == "figure":
        entry["profile"]["blocks"][0]["operations"][0]["flops"] = 9.0
    if damage == "field":
        entry["profile"]["blocks"][0]["colour"] = "blue"
    if damage == "other key":
        entry["key"] = key_of({"another": "model"})
    path.write_text({"cut": text[: len(text) // 2], "empty": ""}.get(damage, json.dumps(entry)))
    assert cache.find(KEY) is None
    cache.keep(KEY, PROFILE)
    assert cache.find(KEY) == PROFILE


def test_an_entry_is_void_when_a_loaded_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = tmp_path / "user_of_cache.py"
    user.write_text("width = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    __import__("user_of_cache")
    try:
        cache = ProfileCache(tmp_path / "profiles")
        cache.keep(KEY, PROFILE)
        assert cache.find(KEY) == PROFILE
        state = user.stat()
        user.write_text("width = 2\n")
        os.utime(user, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert cache.find(KEY) is None
        user.unlink()
        assert cache.find(KEY) is None
        user.write_text("width = 1\n")
        assert cache.find(KEY) == PROFILE
    finally:
        del sys.modules["user_of_cache"]


def test_an_installed_package_counts_by_its_first_file(cache: ProfileCache, tmp_path: Path) -> None:
    entry = json.loads((tmp_path / "profiles" / f"{KEY}.json").read_text())
    (file,) = [name for name in entry["files"] if "pydantic/" in name]
    assert file.endswith("pydantic/__init__.py")


def test_the_digest_is_of_everything() -> None:
    others = [
        replace(PROFILE, tokens=2),
        replace(PROFILE, facts={"peak_bytes": 2.5}),
        replace(PROFILE, blocks=(replace(PROFILE.blocks[0], operations=OPERATIONS[:1]),)),
    ]
    assert len({with_digest(one).digest for one in (PROFILE, *others)}) == 4
    assert with_digest(PROFILE) == PROFILE


def test_only_so_many_are_kept(cache: ProfileCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MAX_ENTRIES", 2)
    os.utime(tmp_path / "profiles" / f"{KEY}.json", (0, 0))
    newer = [key_of({"model": index}) for index in range(2)]
    for key in newer:
        cache.keep(key, PROFILE)
    assert [cache.find(key) for key in (KEY, *newer)] == [None, PROFILE, PROFILE]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = ProfileCache(tmp_path / "file" / "profiles").keep(KEY, PROFILE)
    assert said == f"{tmp_path / 'file' / 'profiles'} cannot be written: Not a directory"


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "allranks" / "profiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/allranks/profiles")


def test_classes_that_come_from_no_file() -> None:
    made = type("Made", (), {"__module__": "__main__of_a_notebook__"})
    assert have_sources([ModelProfile, ProfileCache])
    assert not have_sources([ModelProfile, made])
