"""Do the tensors in memory, or those in the files, have the digests that the manifest says?

Files' SHA-256 proves that nothing changed on the disk; a tensor's digest proves that cutting, writing, reading and
cutting again lost and mixed nothing, because it is computed from the boxes where they lie and is the same for every
Layout.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import Checkpoint, Header
from allranks.checkpointing.commit import Share, explain
from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.checkpointing.index import read_index, read_parts
from allranks.checkpointing.looking_again import await_name
from allranks.checkpointing.manifest import FileRecord, Manifest, TensorRecord
from allranks.checkpointing.parts import Parts, stored_parts, tensor_digest
from allranks.checkpointing.restore import fill
from allranks.checkpointing.tensor_file import Part
from allranks.digest import digest_hex
from allranks.errors import CheckpointError

_NAMED = 10
_BATCH_BYTES = 1 << 28  # of a file in memory at once


def check_digests(
    checkpoint: Checkpoint,
    parts: Parts,
    group: dist.ProcessGroup | None,
    device: torch.device | None = None,
    without: Collection[str] = (),
) -> None:
    """Compare what all ranks hold now with the checkpoint: after a reshard, and once after the first save. A collective
    call.

    Args:
        checkpoint: the one that was restored or saved.
        parts: this rank's local part of every tensor it holds; each box counts once, on its writer.
        group: of the ranks that together hold everything; None: this process alone, which is rank 0.
        device: where the group's backend wants its tensors; the CPU by default.
        without: names in the checkpoint of which nobody here holds anything.

    Raises:
        CheckpointError: on every rank, naming the tensors that differ.
        ProcessError: a peer was lost.
    """
    rank = 0 if group is None else dist.get_rank()
    _compare(
        checkpoint,
        lambda: _sums((e.name, tensor_digest(t, e.box.offset)) for e, t in stored_parts(parts) if e.writer == rank),
        group,
        device,
        without,
    )


def check_files(
    checkpoint: Checkpoint, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Read every file once, its chunks checked, and compare the digests of the tensors in them with the manifest.

    The files are divided among the group's ranks; without one, this process reads all. Raises as `check_digests`.
    """
    rank, world_size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    files = dict(list(checkpoint.manifest.files.items())[rank::world_size])
    mine = replace(checkpoint, manifest=checkpoint.manifest.model_copy(update={"files": files}))
    if group is None:
        read_index(checkpoint.path, checkpoint.manifest)  # says what is missing or twice before all of it is read
    elif rank:
        await_name(checkpoint.path)  # which another rank has given
    _compare(checkpoint, lambda: _sums(_stored_digests(mine)), group, device)


def check_share(directory: Path, header: Header, share: Share) -> None:
    """Read back what one rank has written, and compare every box with the digest that the rank tells of it.

    No collective: together with the commit, which adds these digests, it proves what `check_files` proves afterwards.

    Raises:
        CheckpointError: a box reads back otherwise, or the file is damaged.
    """
    kinds = {name: (dtype, tuple(shape)) for name, dtype, shape, *_ in share.tensors}
    tensors = {name: TensorRecord(dtype=dtype, shape=shape, digest="0" * 16) for name, (dtype, shape) in kinds.items()}
    files = {name: FileRecord(**record) for name, record in share.files.items()}
    manifest = Manifest(**asdict(header), torch="", files=files, tensors=tensors, aliases={}, state={})
    read = _digests_in(Checkpoint(directory, manifest), read_parts(directory, manifest))
    found = {(part.name, part.box.offset): digest for part, digest in read}
    told = {(name, tuple(offset)): digest for name, _, _, offset, _, digest in share.tensors}
    wrong = sorted({name for name, _ in dict(told.items() ^ found.items())})
    if wrong:
        raise CheckpointError(_name_wrong(directory, wrong))


def _stored_digests(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """Of every part in its files, which need not make up whole tensors: the sums tell what is missing or twice."""
    parts = read_parts(checkpoint.path, checkpoint.manifest)
    return ((part.name, digest) for part, digest in _digests_in(checkpoint, parts))


def _digests_in(checkpoint: Checkpoint, parts: Iterable[Part]) -> Iterator[tuple[Part, int]]:
    for batch in _batches(parts):
        tensors = [torch.empty(part.box.shape, dtype=getattr(torch, part.dtype)) for part in batch]
        fill(checkpoint, ((part, part.box, tensor) for part, tensor in zip(batch, tensors, strict=True)))
        for part, tensor in zip(batch, tensors, strict=True):
            yield part, tensor_digest(tensor, part.box.offset)


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Neighbours in one file, a quarter of a GB together (or one larger part), so that few chunks are read twice."""
    batch: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.file, part.start)):
        if batch and (batch[0].file != part.file or part.start + part.num_bytes - batch[0].start > _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _sums(digests: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, digest in digests:
        sums[name] = sums.get(name, 0) + digest
    return sums


def _compare(
    checkpoint: Checkpoint,
    compute: Callable[[], Mapping[str, int]],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    without: Collection[str] = (),
) -> None:
    """Add every rank's sums on the first rank, compare, and let all ranks know; what fails on one rank fails on all."""
    device = device or torch.device("cpu")
    try:
        report = {"error": "", "sums": compute()}
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        report = {"error": explain(error, checkpoint.path), "sums": {}}
    reports = [json.loads(data) for data in gather_bytes(json.dumps(report).encode(), group, device)]
    verdict = broadcast_bytes(_verdict(checkpoint, reports, without).encode(), group, device).decode()
    if verdict:
        raise CheckpointError(verdict)


def _verdict(checkpoint: Checkpoint, reports: list[dict[str, Mapping[str, int]]], without: Collection[str]) -> str:
    """What is wrong in a line; empty where nothing is."""
    for report in reports:
        if report["error"]:
            return str(report["error"])
    totals = _sums(item for report in reports for item in report["sums"].items())
    tensors = checkpoint.manifest.tensors
    wrong = [
        name
        for name, record in tensors.items()
        if name not in without and digest_hex(totals.get(name, 0), record.dtype, record.shape) != record.digest
    ]
    wrong += totals.keys() - tensors.keys()
    if not wrong:
        return ""
    return _name_wrong(checkpoint.path, wrong)


def _name_wrong(path: Path, wrong: list[str]) -> str:
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    named = ", ".join(map(repr, wrong[:_NAMED]))
    return f"{path}: {len(wrong)} tensors differ from their digests: {named}{more}"
