"""A second place for a run's checkpoints: an object store, or another file system, through fsspec. No torch.

    URL/<run id>/step-00000200.<digest>/rank-00000.safetensors ... manifest.json COMMITTED

An object store renames nothing. So COMMITTED is brought last and taken away first, and a directory's name has a digest
of its manifest: what was brought once is never written over. What comes back is checked as what lies on a disk is.

What a later attempt has written is newer, whatever its step: where a run has gone back to an older checkpoint, that is
what it goes on with.
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from allranks.checkpointing.adopting import adopt
from allranks.checkpointing.checkpoint import MANIFEST_FILE, Checkpoint, seal, step_name
from allranks.checkpointing.manifest import MANIFEST_BYTES_CAP, parse_manifest
from allranks.checkpointing.reading import COMMITTED_FILE
from allranks.checkpointing.standstill import Result, unless_still
from allranks.errors import CheckpointError, ConfigError

PATIENCE_SECONDS: Final = 900.0

_NAME = re.compile(r"step-(\d{8,18})\.[0-9a-f]{12}")
_DIGEST_LETTERS: Final = 12
_SEAL_BYTES: Final = len(seal(b""))
_BLOCK_BYTES: Final = 32 << 20
_BUCKETS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Kinds of places without folders, where making one would make a bucket that is missing."""


@final
@dataclass(frozen=True, slots=True, order=True)
class Mirrored:
    """A committed checkpoint in a mirror; in the order of age.

    Attributes:
        generation: the attempt that has written it; -1 where its manifest is damaged, so that all others are newer.
    """

    generation: int
    step: int
    name: str


@final
class Mirror:
    """The checkpoints of one run in the place that `url` names.

    Every method raises CheckpointError, in one line, where the place refuses, or where nothing comes further there for
    `patience` seconds: what it does is in a thread of its own, for a system call to a dead share does not come back.

    Attributes:
        spares: what others than the newest attempt have brought stays, however old: this process could not see
            beforehand what that is, and may have gone on without it.
    """

    def __init__(self, url: str, run: str, patience: float = PATIENCE_SECONDS) -> None:
        """Raises ConfigError: no such kind of place, or its package is not installed."""
        from fsspec.core import url_to_fs

        self.url = url
        try:
            files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"checkpoint.mirror={url}: {reason}; fsspec's own pages name the package") from error
        self._files: Any = files
        self._patience = patience
        self._root = f"{root.rstrip('/')}/{run}"
        self._generations: dict[str, int] = {}
        self._was_there = False
        self._own = 0  # the newest attempt of which this process has brought anything; they count from 1
        self.spares = False

    def list_newest(self, advanced: Callable[[], None] = lambda: None) -> list[Mirrored]:
        """What is committed there, newest first; `advanced`: called, in another thread, as it comes further."""
        return self._refusing("listed", lambda move: self._list_newest(_both(move, advanced)))

    def is_there(self) -> bool:
        """Whether there is a folder of this run. Where it is not, something was there all the same, it may be: a file
        system that is not mounted leaves no error, and an empty directory or none.
        """
        return self._refusing("listed", lambda move: self._is_there())

    def bring(self, checkpoint: Checkpoint, advanced: Callable[[], None] = lambda: None) -> None:
        """Copy a committed checkpoint there; one that is there already is left as it is.

        Args:
            advanced: called after each file, and after each block of one where the place tells of blocks; in another
                thread.
        """
        self._refusing("written", lambda move: self._bring(checkpoint, _both(move, advanced)))

    def prune(self, keep: int, keep_every: int | None = None, advanced: Callable[[], None] = lambda: None) -> None:
        """Take away what is older than the `keep` newest, and what was never brought to its end.

        Args:
            keep_every: those of every so-many-th step stay as well, for ever; None: none.
            advanced: as of `list_newest`.
        """
        self._refusing("tidied", lambda move: self._prune(keep, keep_every, _both(move, advanced)))

    def fetch(
        self, found: Mirrored, directory: Path, run: str, advanced: Callable[[], None] = lambda: None
    ) -> Checkpoint:
        """Bring a checkpoint back into `directory`, RUN/checkpoints, under its name there: whole, verified, or not at
        all. `advanced` as of `bring`, and after each block that is verified.
        """
        return self._refusing("read", lambda move: self._fetch(found, directory, run, _both(move, advanced)))

    def _list_newest(self, move: Callable[[], None]) -> list[Mirrored]:
        found = []
        for step, name in self._names():
            move()
            if self._committed(name):
                found.append(Mirrored(self._generation(name), step, name))
        return sorted(found, reverse=True)

    def _is_there(self) -> bool:
        self._files.invalidate_cache()
        try:
            self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return False
        self._was_there = True
        return True

    def _bring(self, checkpoint: Checkpoint, advanced: Callable[[], None]) -> None:
        manifest = (checkpoint.path / MANIFEST_FILE).read_bytes()
        name = f"{step_name(checkpoint.step)}.{seal(manifest).decode()[:_DIGEST_LETTERS]}"
        place = f"{self._root}/{name}"
        if not self._committed(name):
            self._check_still_there()
            self._make_folder(place)
            try:
                for file in (*checkpoint.manifest.files, MANIFEST_FILE, COMMITTED_FILE):
                    self._put(checkpoint.path / file, f"{place}/{file}", advanced)
                    advanced()
            except Exception:
                with suppress(Exception):  # a disk that is full because of it is full for others, too
                    self._take_back(place, advanced)
                raise
        self._was_there = True
        self._own = max(self._own, checkpoint.manifest.generation)

    def _take_back(self, place: str, advanced: Callable[[], None]) -> None:
        """Remove what was not brought to its end from a file system of this host's; elsewhere it waits for `prune`."""
        advanced()  # raises where it was given up: whoever came after may be writing there
        if self._is_local():
            self._files.rm(place, recursive=True)

    def _make_folder(self, place: str) -> None:
        kinds = self._files.protocol
        if _BUCKETS.isdisjoint((kinds,) if isinstance(kinds, str) else kinds):
            self._files.makedirs(place, exist_ok=True)

    def _prune(self, keep: int, keep_every: int | None, move: Callable[[], None]) -> None:
        newest = self._list_newest(move)
        kept = {found.name for found in newest[:keep]}
        if self.spares:
            kept |= {found.name for found in newest if found.generation != self._own}
        if keep_every is not None:
            kept |= {found.name for found in newest if found.step % keep_every == 0}
        for _, name in self._names():
            if name not in kept:
                move()
                place = f"{self._root}/{name}"
                with suppress(FileNotFoundError):
                    self._files.rm_file(f"{place}/{COMMITTED_FILE}")
                self._files.rm(place, recursive=True)

    def _fetch(self, found: Mirrored, directory: Path, run: str, advanced: Callable[[], None]) -> Checkpoint:
        place = f"{self._root}/{found.name}"

        def bring(empty: Path) -> None:
            for file in (MANIFEST_FILE, COMMITTED_FILE):
                self._check_size(f"{place}/{file}")
                self._get(f"{place}/{file}", empty / file, advanced)
            manifest = parse_manifest((empty / MANIFEST_FILE).read_bytes(), f"{self.url}: {found.name}")
            if manifest.step != found.step:
                raise CheckpointError(f"{self.url}: {found.name} is of step {manifest.step}")
            for file, record in manifest.files.items():  # their names were checked: none leads elsewhere
                size = self._files.size(f"{place}/{file}")
                if size != record.bytes:  # else it could fill the disk
                    said = f"{size} bytes, and {record.bytes} in its manifest"
                    raise CheckpointError(f"{self.url}: {found.name}: {file} has {said}")
                self._get(f"{place}/{file}", empty / file, advanced)

        return adopt(directory, found.step, run, bring, advanced)

    def _check_still_there(self) -> None:
        """See that a folder that was there is, before it would be made anew where its file system was mounted."""
        if self._was_there and self._is_local() and not self._is_there():
            raise CheckpointError(
                f"{self.url} cannot be written: {self._root} was there and is not any more; mount its file system "
                "again, or make the folder if it was deleted on purpose"
            )

    def _put(self, source: Path, target: str, advanced: Callable[[], None]) -> None:
        """Copy one file there, and tell of each block: a large one takes longer than nothing may go on."""
        if self._is_local():
            _copy(source, Path(target), advanced)
        else:
            self._files.put_file(str(source), target, callback=_told(advanced))

    def _get(self, source: str, target: Path, advanced: Callable[[], None]) -> None:
        """Copy one file from there, and tell as `_put`."""
        if self._is_local():
            _copy(Path(source), target, advanced)
        else:
            self._files.get_file(source, str(target), callback=_told(advanced))
        advanced()

    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._files, LocalFileSystem)

    def _names(self) -> list[tuple[int, str]]:
        self._files.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return [(int(match[1]), match[0]) for match in map(_NAME.fullmatch, names) if match]

    def _generation(self, name: str) -> int:
        """What its manifest says; read once, for what has the name is never written over."""
        if name not in self._generations:
            path = f"{self._root}/{name}/{MANIFEST_FILE}"
            found = -1
            with suppress(CheckpointError, FileNotFoundError):
                self._check_size(path)
                found = parse_manifest(self._files.cat_file(path), f"{self.url}: {name}").generation
            self._generations[name] = found  # not where the place refuses: it may have another answer the next time
        return self._generations[name]

    def _committed(self, name: str) -> bool:
        try:
            size = self._files.info(f"{self._root}/{name}/{COMMITTED_FILE}")["size"]
        except FileNotFoundError:  # and nothing else: `exists` takes any error for an absence
            return False
        return size in (None, _SEAL_BYTES)  # a full disk, or a kill, leaves less of it; None: that place does not tell

    def _check_size(self, path: str) -> None:
        size = self._files.size(path)
        if size is None or size > MANIFEST_BYTES_CAP:
            raise CheckpointError(f"{self.url}: {path} has {size} bytes, at most {MANIFEST_BYTES_CAP} are read")

    def _refusing(self, done: str, call: Callable[[Callable[[], None]], Result]) -> Result:
        """What `call` returns; what a store says, whatever class it has, in one line."""
        try:
            return unless_still(self._patience, call)
        except CheckpointError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(f"{self.url} cannot be {done}: {type(error).__name__}: {reason:.300}") from error


def _both(one: Callable[[], None], other: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        one()
        other()

    return both


def _told(advanced: Callable[[], None]) -> Any:
    """What fsspec calls whenever a block has gone."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"advanced": lambda size, value, **_: advanced()})


def _copy(source: Path, target: Path, advanced: Callable[[], None]) -> None:
    """Between two file systems of this host's, such as NFS: fsspec tells nothing of it, and what is not synced
    meanwhile is when the file is closed.
    """
    with source.open("rb") as file, target.open("wb") as copy:
        while block := file.read(_BLOCK_BYTES):
            copy.write(block)
            copy.flush()
            os.fsync(copy.fileno())
            advanced()
