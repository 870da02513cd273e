"""Files that are whole or absent, also after a crash, and a directory that refuses in one line.

What is replaced is written beside itself, synced and renamed; the parent is synced, so the name survives too.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from allranks.errors import ConfigError, RunError


def preflight_writable(directory: Path) -> None:
    """Prove that `directory` (or what will hold it, if absent) can be written: write, sync, rename, read back.

    Raises:
        RunError: it cannot, with the system's reason.
    """
    place = next(place for place in (directory, *directory.absolute().parents) if place.exists())
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


def write_whole(path: Path, text: str) -> None:
    """Write a file that the user has named, and the folders above it: whole, or what was there stays.

    Raises:
        ConfigError: the system does not let it be written there.
    """
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
