"""A checkpoint's directory: which are there, and which is good. No torch.

    checkpoints/step-00000200/               committed: it is whole, and stays
        manifest.json  rank-00000.safetensors ...  COMMITTED
    checkpoints/step-00000300.tmp-<token>/   being written, or left by a writer that died
    checkpoints/.trash-step-00000100-<id>/   being deleted

COMMITTED holds the SHA-256 of manifest.json, which holds the SHA-256 of everything else; the directory gets its name by
one rename after all of it is on the disk. So what has the name is whole, unless the disk or somebody has changed it
since, and that shows.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allranks import fault_points
from allranks.checkpointing.index import read_index
from allranks.checkpointing.manifest import MANIFEST_BYTES_CAP, Manifest, parse_manifest, sha256_hex
from allranks.checkpointing.reading import COMMITTED_FILE, held
from allranks.checkpointing.tensor_file import OpenFile, open_regular
from allranks.durable import sync
from allranks.errors import CheckpointError

__all__ = ["Checkpoint", "Header", "Manifest", "Skipped", "list_checkpoints", "newest_good", "verify_files"]

MANIFEST_FILE: Final = "manifest.json"
_COMMITTED_BYTES_CAP = 4096
_STEP = re.compile(r"step-(\d{8,18})")
TEMPORARY = re.compile(r"step-\d{8,18}\.tmp-(?P<token>\w+_(?P<attempt>\d+)|\w+)")  # as training/saver.py names them
TRASH = ".trash-"


@dataclass(frozen=True, slots=True)
class Header:
    """What a checkpoint says of its run; `generation` counts its attempts, `step` and `samples` what is done."""

    run: str
    generation: int
    layout: str
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose manifest has been read and checked; its files are checked as they are read."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str, run_id: str | None = None) -> "Checkpoint":
        """As `read`, and see that every file is there with its length."""
        checkpoint = cls.read(path, run_id)
        check_sizes(checkpoint)
        return checkpoint

    @classmethod
    def read(cls, path: Path | str, run_id: str | None = None) -> "Checkpoint":
        """Read the manifest; no other file is looked at.

        Raises:
            CheckpointError: no checkpoint, never committed, torn, of another schema, of another run than `run_id`, or
                under the name of another step, in one line.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if run_id is not None and manifest.run != run_id:
            raise CheckpointError(
                f"{path} belongs to run {manifest.run!r:.80}, not to {run_id!r}; resume that run, or start a new one"
            )
        if _STEP.fullmatch(path.name) and path.name != step_name(manifest.step):
            raise CheckpointError(f"{path} holds step {manifest.step}, not that of its name; the checkpoint is damaged")
        return cls(path, manifest)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was taken."""
        return self.manifest.step

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors' files."""
        return sum(record.bytes for record in self.manifest.files.values())

    def __repr__(self) -> str:
        return f"<Checkpoint step {self.step} {str(self.path)!r}>"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A directory that looks like a checkpoint and is no good one, and why."""

    path: Path
    reason: str


def seal(manifest: bytes) -> bytes:
    """What the file COMMITTED holds beside that manifest."""
    return (sha256_hex(manifest) + "\n").encode()


def step_name(step: int) -> str:
    """The name of the directory of optimizer step `step`."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step that a checkpoint's directory is named after."""
    match = _STEP.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def list_checkpoints(directory: Path | str) -> list[Path]:
    """The committed checkpoints' directories, newest (highest step) first; not opened. A missing directory has none."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            match = _STEP.fullmatch(entry.name)
            if (
                match
                and entry.is_dir(follow_symlinks=False)
                and os.path.lexists(os.path.join(entry.path, COMMITTED_FILE))
            ):
                found.append((int(match[1]), Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def check_sizes(checkpoint: Checkpoint) -> None:
    """See that every file is there, an ordinary one, with its length; reads no data.

    Raises:
        CheckpointError: one is not.
    """
    for name, record in checkpoint.manifest.files.items():
        OpenFile(checkpoint.path, name, record).close()


def verify_files(checkpoint: Checkpoint, num_threads: int = 2, progress: Callable[[], None] = lambda: None) -> None:
    """Read every byte of every file, compare it with its SHA-256, and see that the boxes make up every tensor.

    Args:
        progress: called after each chunk.

    Raises:
        CheckpointError: the first damage found: which file, which bytes.
    """
    read_index(checkpoint.path, checkpoint.manifest)
    for name, record in checkpoint.manifest.files.items():
        with closing(OpenFile(checkpoint.path, name, record)) as file:
            for _ in file.chunks(num_threads=num_threads):
                progress()


def newest_good(
    directory: Path | str, run_id: str | None = None, check: Callable[[Checkpoint], None] = verify_files
) -> tuple[Checkpoint | None, list[Skipped]]:
    """The newest checkpoint whose manifest is good and that passes `check`, and newer ones that are not, newest first.

    `check` looks at the files, and reads every byte by default. `check_sizes` is enough before a `restore`, which
    checks what it reads. The caller says loudly that something was skipped. None: there is no good one.

    The run may go on meanwhile: what is looked at stays (reading.py), and where what was listed has been deleted before
    its turn, what is there now is looked at: nothing that is only too old counts as damaged.
    """
    bad, listed = dict[Path, str](), list_checkpoints(directory)
    while listed:
        skipped = list[Skipped]()
        for path in listed:
            try:
                if path not in bad:
                    with held(path):
                        checkpoint = Checkpoint.read(path, run_id)
                        check(checkpoint)
                    return checkpoint, skipped
            except CheckpointError as error:
                if not os.path.lexists(path):
                    break
                bad[path] = str(error)
            skipped.append(Skipped(path, bad[path]))
        else:
            return None, skipped
        listed = list_checkpoints(directory)
    return None, []


def discard(path: Path, rename: Callable[[Path], Path | None] | None = None) -> bool:
    """Delete a checkpoint so that no crash leaves half of one under its name: rename first, then delete.

    Args:
        rename: `set_aside`, or what may refuse that with None: then all stays, and False is returned.

    Raises:
        CheckpointError: it cannot be renamed or deleted.
    """
    try:
        trash = (rename or set_aside)(path)
        if trash is None:
            return False
        fault_points.reach("checkpoint.remove")
        shutil.rmtree(trash)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be deleted: {error.strerror or error}") from error
    return True


def set_aside(path: Path) -> Path:
    """Take a directory's name away, and see that this is on the disk; what it is called now. Raises OSError."""
    trash = path.with_name(f"{TRASH}{path.name}-{secrets.token_hex(4)}")
    path.rename(trash)
    sync(path.parent)
    return trash


def read_manifest(path: Path) -> Manifest:
    """The manifest that was committed. Raises CheckpointError: it is none, or is damaged."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is no checkpoint: no such directory; `allranks checkpoint list` names those of a run"
        )
    committed = _read_small(path / COMMITTED_FILE, _COMMITTED_BYTES_CAP)
    if committed is None:
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {COMMITTED_FILE} file, so it was never finished; use an older one"
        )
    data = _read_small(path / MANIFEST_FILE, MANIFEST_BYTES_CAP)
    if data is None:
        raise CheckpointError(f"{path / MANIFEST_FILE} is missing; the checkpoint is damaged")
    if committed != seal(data):
        raise CheckpointError(f"{path / MANIFEST_FILE} is not the one that was committed; the checkpoint is damaged")
    return parse_manifest(data, str(path / MANIFEST_FILE))


def _read_small(path: Path, cap: int) -> bytes | None:
    """The bytes of an ordinary file of at most `cap`, None where there is none."""
    if not os.path.lexists(path):
        return None
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > cap:
            raise CheckpointError(f"{path} has {size} bytes, at most {cap} are read; the checkpoint is damaged")
        try:
            return file.read(size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
