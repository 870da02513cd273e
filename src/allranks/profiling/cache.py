"""Profiles that were made before, on disk: one JSON file each, under what identifies the model.

An entry also names every source file that was loaded when it was made, with its digest: one that has changed makes the
entry void. What cannot be read, or reads back differently, is no entry; the next profile takes its place.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, final

from pydantic import BaseModel, ConfigDict, ValidationError

from allranks.durable import replacing
from allranks.home_directory import user_folder
from allranks.model_profile import ModelProfile
from allranks.users_code import is_installed

MAX_ENTRIES: Final = 200
"""An entry takes some 50 kB; the oldest go first."""
_LIBRARY: Final = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))


def cache_folder() -> Path:
    """Where the user's profiles are kept: `$XDG_CACHE_HOME/allranks/profiles`, by default below `~/.cache`."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "allranks" / "profiles"


def key_of(described: Mapping[str, Any]) -> str:
    """A name of 64 characters for whatever JSON can hold; what it cannot is taken by its repr."""
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=repr).encode()).hexdigest()


def with_digest(profile: ModelProfile) -> ModelProfile:
    """The profile with the digest of everything else in it."""
    return replace(profile, digest=key_of(asdict(replace(profile, digest=""))))


def have_sources(classes: Iterable[type]) -> bool:
    """Whether all of these come from files, so that a change of their code can be seen; a notebook's do not."""
    modules = [sys.modules.get(found.__module__) for found in classes]
    return all(module is not None and _file_of(module) is not None for module in modules)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    key: str
    files: dict[str, str]
    profile: ModelProfile


@final
class ProfileCache:
    """The entries of a folder.

    Args:
        folder: by default `cache_folder()`. It is made when something is kept.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = cache_folder() if folder is None else folder

    def find(self, key: str) -> ModelProfile | None:
        """The profile that was kept under `key`; None where there is none, or the code it was made by has changed."""
        try:
            entry = _Entry.model_validate_json(self._path(key).read_bytes())
        except (OSError, ValidationError):
            return None
        sound = entry.key == key and with_digest(entry.profile) == entry.profile
        return entry.profile if sound and unchanged(entry.files) else None

    def keep(self, key: str, profile: ModelProfile) -> str:
        """Write an entry for the code that is loaded now; "" or why that was not possible."""
        entry = _Entry(key=key, files=loaded_stamps(), profile=profile)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(key)) as temporary:
                temporary.write_text(entry.model_dump_json(), encoding="utf-8")
            drop_oldest(self._folder)
        except OSError as error:
            return f"{self._folder} cannot be written: {error.strerror or error}"
        return ""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def drop_oldest(folder: Path) -> None:
    """Leave the newest MAX_ENTRIES of `folder`."""
    entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in entries[MAX_ENTRIES:]:
        with suppress(FileNotFoundError):  # another process drops too
            path.unlink()


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts, types and functions: what a forward may depend on besides tensors and modules."""
    kept = {name: value for name, value in attributes.items() if isinstance(value, bool | int | float | str | tuple)}
    named = {name: value.__qualname__ for name, value in attributes.items() if hasattr(value, "__qualname__")}
    return {**kept, **named}


def loaded_stamps() -> dict[str, str]:
    """Every source file that is loaded now, with what changes when it does."""
    return {str(file): _stamp(file) for file in _loaded_files()}


def unchanged(files: Mapping[str, str]) -> bool:
    """Whether the files still have the stamps that `loaded_stamps` gave them."""
    return all(_stamp(Path(file)) == seen for file, seen in files.items())


def _loaded_files() -> list[Path]:
    """The source files of all modules; of an installed package the one that every release writes anew."""
    modules = dict(sys.modules)
    found = set()
    for name, module in modules.items():
        file = _file_of(module)
        if file is None or (file.startswith(_LIBRARY) and not is_installed(file)):
            continue
        if is_installed(file):
            top = modules.get(name.partition(".")[0])
            file = None if top is None else _file_of(top)
        if file is not None:
            found.add(Path(file))
    return sorted(found)


def _file_of(module: object) -> str | None:
    file = getattr(module, "__file__", None)
    return file if isinstance(file, str) and Path(file).is_file() else None


def _stamp(file: Path) -> str:
    """What changes when the file does: its digest; of an installed package size and time, which costs no read."""
    try:
        if is_installed(str(file)):
            state = file.stat()
            return f"{state.st_size} {state.st_mtime_ns}"
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
