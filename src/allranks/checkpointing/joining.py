"""A checkpoint whose files lie in the memory of several hosts, brought together on the disk that all share. No torch.

Every host puts there what it has, and who finds all of it there commits: nobody leads, and nobody waits.

    checkpoints/step-N.tmp-<run>h_<attempt>/   what has come so far
    checkpoints/step-N.tmp-<host>_<attempt>/   what one host is writing; each file goes over by one rename
"""

import os
import secrets
import shutil
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


def newest_part(directory: Path, run: str) -> HostPart | None:
    """The newest that `directory` has of any checkpoint of this run; None: nothing that can be read."""
    for path in list_checkpoints(directory):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.run == run:
                return HostPart(path, manifest)
    return None


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
    name, run = part.path.name, part.manifest.run
    common, own = (directory / f"{name}.tmp-{token}_{attempt}" for token in (f"{run[:8]}h", secrets.token_hex(4)))
    target, wrong = directory / name, list[str]()
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
        shutil.rmtree(own, ignore_errors=True)
        if _is_there(target, part):
            shutil.rmtree(common, ignore_errors=True)
    return wrong


def _has(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.bytes


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
    """Give it its name; nothing where another host is about to: who makes COMMITTED does it alone."""
    text = render_manifest(part.manifest)
    write_synced(own / MANIFEST_FILE, text)
    try:
        os.replace(own / MANIFEST_FILE, common / MANIFEST_FILE)
        descriptor = os.open(common / COMMITTED_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except (FileExistsError, FileNotFoundError):
        return
    with os.fdopen(descriptor, "wb") as file:
        file.write(seal(text.encode()))
        file.flush()
        os.fsync(file.fileno())
    sync(common)
    replaced = publish(common, target, partial(sync, target.parent))
    if replaced is not None:
        with suppress(CheckpointError):
            discard(replaced)
