"""The commit: from what every rank has written to one directory under its final name. No torch.

Order is everything here: nothing gets a name before what it names is on the disk.
"""

import contextlib
import ctypes
import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from allranks import fault_points
from allranks.checkpointing.checkpoint import MANIFEST_FILE, Checkpoint, Header, discard, seal
from allranks.checkpointing.index import check_cover
from allranks.checkpointing.manifest import FileRecord, Manifest, TensorRecord, render_manifest
from allranks.checkpointing.reading import COMMITTED_FILE
from allranks.digest import digest_hex
from allranks.durable import sync, write_synced
from allranks.errors import AllranksError, CheckpointError
from allranks.parameter_map import Box
from allranks.units import format_bytes

_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of renameat2(2)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank has written, or the error that kept it from it."""

    rank: int
    error: str = ""
    files: Mapping[str, Any] = field(default_factory=dict)  # name -> a FileRecord's members
    tensors: Sequence[tuple[str, str, Sequence[int], Sequence[int], Sequence[int], int]] = ()
    # of each that it wrote: name, dtype, whole shape, the box's offset and shape, its share of the digest
    held: Sequence[tuple[str, str, Sequence[int]]] = ()  # of those who tell: all it holds, whoever writes it
    aliases: Mapping[str, str] = field(default_factory=dict)


TAKEN_OVER: Final = "a later one has taken over, and this one stops"
"""In the error of an attempt that is not the run's newest one: errors travel between ranks as their words."""


def check_target(target: Path, header: Header) -> None:
    """See that what already has the checkpoint's name, if anything does, may be replaced.

    Raises:
        CheckpointError: it is no directory, another run's, or from a later attempt of this run: this process is the
            stale one.
    """
    if not os.path.lexists(target):
        return
    if target.is_symlink() or not target.is_dir():
        raise CheckpointError(f"{target} is there and is no directory; move it away")
    try:
        manifest = Checkpoint.open(target).manifest
    except CheckpointError:
        return  # a damaged one may go
    if manifest.run != header.run:
        raise CheckpointError(
            f"{target} belongs to run {manifest.run!r:.80}, this is {header.run!r}; give this run its own directory"
        )
    if manifest.generation > header.generation:
        raise CheckpointError(
            f"{target} is from attempt {manifest.generation} of this run, this is attempt {header.generation}: "
            f"{TAKEN_OVER}"
        )


def commit(
    temporary: Path, target: Path, header: Header, shares: Sequence[Share], state: Mapping[str, Any], torch_version: str
) -> Manifest:
    """Make `temporary`, to which every rank has written its share, the checkpoint `target`.

    Raises:
        CheckpointError: a rank has failed, the shares make up no whole, or the file system refuses.
    """
    check_errors(shares)
    manifest = merge(header, shares, state, torch_version, str(target))
    try:
        _check_visible(temporary, manifest)
        fault_points.reach("checkpoint.manifest")
        text = render_manifest(manifest)
        write_synced(temporary / MANIFEST_FILE, text)
        write_synced(temporary / COMMITTED_FILE, seal(text.encode()).decode())
        sync(temporary)
        fault_points.reach("checkpoint.rename")
        check_attempt(target, header.run, header.generation)

        def settle() -> None:
            fault_points.reach("checkpoint.renamed")
            sync(target.parent)
            sync(target.parent.parent)

        replaced = publish(temporary, target, settle)
    except OSError as error:
        raise CheckpointError(f"rank {shares[0].rank}: {explain(error, temporary)}") from error
    if replaced is not None:
        with contextlib.suppress(CheckpointError):  # the new one is safe; retention collects what could not be deleted
            discard(replaced)
    return manifest


def check_errors(shares: Sequence[Share]) -> None:
    """See that every rank has written its share. Raises CheckpointError: one could not."""
    errors = [share.error for share in shares if share.error]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise CheckpointError(errors[0] + more)


def check_attempt(target: Path, run: str, attempt: int) -> None:
    """See that no later attempt of this run has begun, under a leader that has taken over from this one's.

    Whoever takes over counts the attempt first and then deletes what others have begun to write: so who passes here
    just before has nothing to rename.
    """
    record = target.parent.parent / "run.json"
    if target.parent.name != "checkpoints":
        return  # not RUN's: a copy in a host's memory, whose neighbours there are anybody's
    try:
        told = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # a checkpoint of no Run directory
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{record} cannot be read: {error}") from error
    if isinstance(told, dict) and told.get("id") == run and told.get("attempts", 0) > attempt:
        raise CheckpointError(
            f"attempt {told['attempts']} of this run has begun, this is attempt {attempt}: {TAKEN_OVER}"
        )


def explain(error: Exception, path: Path, num_bytes: int = 0) -> str:
    """An error in a line: path and the system's words, and for a full disk what is needed, free and used up."""
    if not isinstance(error, OSError):
        return str(error) if isinstance(error, AllranksError) else f"{type(error).__name__}: {error}"
    text = f"{error.filename or path}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        disk = os.statvfs(next(place for place in (path, *path.parents) if place.exists()))
        needs = f"this rank needs {format_bytes(num_bytes)}, " if num_bytes else ""
        free = f"{format_bytes(disk.f_bavail * disk.f_frsize)} are free"
        if error.errno == errno.EDQUOT:
            free = f"a quota is used up, `quota -s` tells which; of the disk itself {free}"
        elif disk.f_files and not disk.f_favail:
            free = f"no more files fit there, `df -i` tells; {free}"
        text += f" ({needs}{free})"
    return text


def merge(
    header: Header, shares: Sequence[Share], state: Mapping[str, Any], torch_version: str, where: str
) -> Manifest:
    """The manifest of what all ranks wrote; their boxes must make up every tensor."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    sums: dict[str, int] = {}
    boxes: dict[str, list[Box]] = {}
    for share in shares:
        for name, dtype, shape, offset, extent, digest in share.tensors:
            kind = (dtype, tuple(shape))
            if kinds.setdefault(name, kind) != kind:
                raise CheckpointError(f"rank {share.rank}: {name!r} is {kind} here and {kinds[name]} on another rank")
            sums[name] = sums.get(name, 0) + digest
            boxes.setdefault(name, []).append(Box(tuple(offset), tuple(extent)))
    for name, dtype, shape in (one for share in shares for one in share.held):
        kinds.setdefault(name, (dtype, tuple(shape)))
    for name, (_, shape) in kinds.items():
        check_cover(name, shape, boxes.get(name, []), where)
    return Manifest(
        **asdict(header),
        torch=torch_version,
        files={name: FileRecord(**record) for share in shares for name, record in share.files.items()},
        tensors={
            name: TensorRecord(dtype=dtype, shape=shape, digest=digest_hex(sums.get(name, 0), dtype, shape))
            for name, (dtype, shape) in kinds.items()
        },
        aliases={alias: name for share in shares for alias, name in share.aliases.items()},
        state=dict(state),
    )


def _check_visible(temporary: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != record.bytes:
            raise CheckpointError(
                f"{path}: written by its rank, not to be seen here; checkpoints need a directory that all hosts share"
            )


def publish(temporary: Path, target: Path, settle: Callable[[], None]) -> Path | None:
    """Give `temporary` the name `target`; where that was taken, return where the old one now is.

    Args:
        settle: waits until the names are on the disk. Where the system refuses that, both have the names again that
            they had: what could not be settled is not there, and its caller may delete `temporary`.

    Raises:
        OSError: the system's refusal.
    """
    replaced = _name(temporary, target)
    try:
        settle()
    except OSError:
        _take_back(temporary, target, replaced)
        raise
    return replaced


def _name(temporary: Path, target: Path) -> Path | None:
    if not os.path.lexists(target):
        os.rename(temporary, target)
        return None
    if _exchange(temporary, target):
        return temporary
    # No file system call swaps them here: for a moment neither has the name, but both are whole.
    aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
    os.rename(target, aside)
    os.rename(temporary, target)
    return aside


def _take_back(temporary: Path, target: Path, replaced: Path | None) -> None:
    if replaced != temporary or not _exchange(temporary, target):
        aside = target.with_name(f"{target.name}.tmp-{secrets.token_hex(4)}")
        os.rename(target, aside)
        if replaced is not None:
            os.rename(replaced, target)
        os.rename(aside, temporary)
    with contextlib.suppress(OSError):
        sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names at once; False where system or file system cannot."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    failed: int = call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return failed == 0
