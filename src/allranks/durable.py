"""Files that are whole or absent, also after a crash, and a directory that refuses in one line.

What is replaced is written beside itself, synced and renamed; the parent is synced, so the name survives too.
"""

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from allranks.errors import ConfigError, RunError

APPENDED = (".log", ".jsonl")


def preflight_writable(directory: Path) -> None:
    """Prove that `directory` (or what will hold it, if absent) can be written: write, sync, rename, read back.

    Raises:
        RunError: it cannot, with the system's reason.
    """
    with refusing(directory):  # also to look at it
        place = _standing(directory)
    token = secrets.token_hex(8)
    probe, renamed = place / f".probe-{token}", place / f".probe-{token}.renamed"
    try:
        with refusing(directory):
            write_synced(probe, token)
            probe.rename(renamed)
            if renamed.read_text(encoding="utf-8") != token:
                raise RunError(f"{directory}: what was written reads back differently; choose another with --run DIR")
    finally:
        for leftover in (probe, renamed):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def make_folders(path: Path, names: Iterable[str]) -> None:
    """Make the folders of these names in `path`, and `path` itself, where they are missing.

    Raises:
        RunError: something else stands there, or a link in them where a log or a journal would be appended to.
        OSError: the system does not let them be made.
    """
    for folder in (path / name for name in names):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise RunError(f"{folder} is no directory, which a run keeps there; move it away") from None
        link = next((one for one in folder.iterdir() if one.suffix in APPENDED and one.is_symlink()), None)
        if link is not None:
            raise RunError(f"{link} is a link: another file would be written; remove it")


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write at `path` into a RunError of one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"{path} cannot be written: {reason}; choose another place with --run DIR") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write; on leaving it becomes `path` at once and durably, after an error it vanishes."""
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _standing(place: Path) -> Path:
    """The place itself, or the nearest above it that is there."""
    return next(one for one in (place, *place.absolute().parents) if one.exists())


def check_target(path: Path) -> None:
    """Before the work: may `write_whole` write its result there? Nothing is left behind.

    Raises:
        ConfigError: it names no file, a directory, or a place where the system lets none be written.
    """
    _check_name(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; name a file in it, or another place")
        with tempfile.TemporaryFile(dir=_standing(path.parent)):
            pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name another place") from error


def _check_name(path: Path) -> None:
    if not path.name:
        raise ConfigError(f"'{path}' names no file; write the name of one behind it, or another place")


def write_whole(path: Path, text: str) -> None:
    """Write a file that the user has named, and the folders above it: whole, or what was there stays.

    Raises:
        ConfigError: it names no file, or the system does not let it be written there.
    """
    _check_name(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            write_synced(draft, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; name another place") from error
    except UnicodeEncodeError as error:
        bad = error.object[max(0, error.start - 20) : error.end + 20]
        raise ConfigError(f"{path} would hold a name that is no UTF-8: {bad!r}; give it one in UTF-8") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a new JSON file and wait until it is on the disk."""
    write_synced(path, json.dumps(value, indent=2) + "\n")


def write_synced(path: Path, text: str) -> None:
    """Write a new file and wait until it is on the disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
