"""A checkpoint whose files lie in the memory of several hosts, brought together on the disk that all share. No torch.

Every host puts there what it has, and who finds all of it there commits: nobody leads, and nobody waits.

    checkpoints/step-N.tmp-<run>h<manifest>_<attempt>/   what has come so far
    checkpoints/step-N.tmp-<host>_<attempt>/             what one host is writing; each file goes over by one rename

A host that comes late makes the first anew. So who commits takes it to its own by one rename, and looks again at what
it has taken; who removes it does, too: nobody names or deletes what another is filling.
"""

import os
import secrets
import shutil
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, final

from allranks.checkpointing.checkpoint import (
    MANIFEST_FILE,
    Checkpoint,
    check_sizes,
    discard,
    list_checkpoints,
    newest_good,
    read_manifest,
    seal,
)
from allranks.checkpointing.commit import check_attempt, publish
from allranks.checkpointing.manifest import FileRecord, Manifest, render_manifest
from allranks.checkpointing.reading import COMMITTED_FILE
from allranks.checkpointing.tensor_file import OpenFile
from allranks.durable import sync, write_synced
from allranks.errors import CheckpointError

KEPT: Final = "kept-"
"""Before the name of a file that another host's rank has written."""


@final
@dataclass(frozen=True, slots=True)
class HostPart:
    """What one host has of a checkpoint.

    Attributes:
        path: where it lies.
        manifest: of the whole checkpoint.
    """

    path: Path
    manifest: Manifest

    @property
    def newness(self) -> tuple[int, int]:
        """Greater is newer: what a later attempt has written, whatever its step."""
        return self.manifest.generation, self.manifest.step

    @property
    def seal(self) -> str:
        """The same on all hosts that have a part of it."""
        return seal(render_manifest(self.manifest).encode()).decode().strip()

    def files(self) -> dict[str, Path]:
        """Name in the checkpoint -> the file, of each that is there with its length: its own ranks' first."""
        own = {name: self.path / name for name in self.manifest.files}
        kept = {name: self.path / f"{KEPT}{name}" for name in self.manifest.files}
        found = [(name, path) for paths in (own, kept) for name, path in paths.items()]
        return {name: path for name, path in found if _has(path, self.manifest.files[name])}


def list_parts(directory: Path, run: str) -> list[HostPart]:
    """What `directory` has of checkpoints of this run and can be read, newest first.

    More than one where a save was under way: another host may not have the newest yet, but all have the one before.
    """
    found = []
    for path in list_checkpoints(directory):
        with suppress(CheckpointError):
            found.append(HostPart(path, read_manifest(path)))
    return sorted((part for part in found if part.manifest.run == run), key=lambda part: part.newness, reverse=True)


def is_wanted(newness: tuple[int, int], directory: Path, run: str) -> bool:
    """Whether the disk has nothing as new that is good, as far as names and lengths tell."""
    newest, _ = newest_good(directory, run, check_sizes)
    return newest is None or (newest.manifest.generation, newest.step) < newness


def bring_part(part: HostPart, directory: Path, attempt: int) -> list[str]:
    """Bring what this host has of a checkpoint to where all hosts bring theirs, and commit it if that makes it whole.

    Args:
        directory: RUN/checkpoints.
        attempt: of the run, the newest that this host knows of: what a later one has begun is left alone.

    Returns:
        Why files that are here could not be taken, one line each.

    Raises:
        CheckpointError: a later attempt has begun.
        OSError: the system's refusal.
    """
    common, own = _places(part, directory, attempt)
    run, target, wrong = part.manifest.run, directory / part.path.name, list[str]()
    try:
        for made in (own, common):
            made.mkdir(parents=True, exist_ok=True)
        for file, source in part.files().items():
            record = part.manifest.files[file]
            if _is_there(target, part) or _has(common / file, record):
                continue
            try:
                _copy_checked(source, record, own / file)
            except CheckpointError as error:
                wrong.append(str(error))
                continue
            with suppress(FileNotFoundError):  # another host has committed it meanwhile
                os.replace(own / file, common / file)
        if not _is_there(target, part) and _all_there(common, part.manifest):
            check_attempt(target, run, attempt)
            _commit(part, own, common, target)
    finally:
        if _is_there(target, part):
            with suppress(OSError):  # there is none, or another host has taken it
                os.rename(common, own / "left")
        shutil.rmtree(own, ignore_errors=True)
    return wrong


def take_away(part: HostPart, directory: Path, attempt: int) -> None:
    """Delete what hosts have brought of a checkpoint that nobody wants any more, a newer one being there."""
    common, own = _places(part, directory, attempt)
    with suppress(OSError):  # there is none, or another host is at it
        os.rename(common, own)
        shutil.rmtree(own, ignore_errors=True)


def _places(part: HostPart, directory: Path, attempt: int) -> tuple[Path, Path]:
    """(Where all hosts bring a checkpoint, and a place of this host's own.)"""
    tokens = f"{part.manifest.run[:8]}h{part.seal[:8]}", secrets.token_hex(4)
    common, own = (directory / f"{part.path.name}.tmp-{token}_{attempt}" for token in tokens)
    return common, own


def _has(path: Path, record: FileRecord) -> bool:
    try:
        found = path.stat()  # once: another host may take it away between two looks
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == record.bytes


def _all_there(common: Path, manifest: Manifest) -> bool:
    return all(_has(common / name, record) for name, record in manifest.files.items())


def _is_there(target: Path, part: HostPart) -> bool:
    """Whether it is on the disk: this one, and no older one of its step."""
    try:
        return Checkpoint.open(target).manifest == part.manifest
    except CheckpointError:
        return False


def _copy_checked(source: Path, record: FileRecord, target: Path) -> None:
    """Copy a file whose every byte is as the manifest says. Raises CheckpointError: it is not."""
    with closing(OpenFile(source.parent, source.name, record)) as file, target.open("xb") as copy:
        for _, data in file.chunks():
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())


def _commit(part: HostPart, own: Path, common: Path, target: Path) -> None:
    """Give it its name; nothing where another host is about to, or has: who takes what has come does it alone."""
    text, taken = render_manifest(part.manifest), own / "taken"
    write_synced(own / MANIFEST_FILE, text)
    write_synced(own / COMMITTED_FILE, seal(text.encode()).decode())
    try:
        os.rename(common, taken)
    except FileNotFoundError:
        return
    if _is_there(target, part) or not _all_there(taken, part.manifest):
        return  # another host has committed it since, and this is what one that came later has made anew
    try:
        for file in (MANIFEST_FILE, COMMITTED_FILE):
            os.replace(own / file, taken / file)
        sync(taken)
        replaced = publish(taken, target, partial(sync, target.parent))
    except OSError:
        if _is_there(target, part):
            return  # two have named it at the same moment
        _give_back(taken, common)
        raise
    if replaced is not None:
        with suppress(CheckpointError):
            discard(replaced)


def _give_back(taken: Path, common: Path) -> None:
    """The other hosts may have more luck; one that came late may have made `common` anew."""
    with suppress(OSError):
        os.rename(taken, common)
        return
    with suppress(OSError):
        for file in taken.iterdir():
            os.replace(file, common / file.name)
