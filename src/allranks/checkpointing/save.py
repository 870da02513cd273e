"""Saving a checkpoint from shards: every rank writes its boxes, the first one commits, and it is whole or absent (law
9).

    every rank    step-N.tmp-<token>/rank-R.safetensors, written, hashed and synced
    exchange      what each has written, or why it could not
    first rank    manifest.json, COMMITTED, the directory synced; renamed to step-N; the parent synced
    exchange      the manifest, or why there is none: every rank returns, or every rank raises

No rank stops between two exchanges: what fails on one is carried to all, so none waits for another that has given up.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from allranks import fault_points
from allranks.checkpointing.checkpoint import MANIFEST_FILE, Checkpoint, Header, step_name
from allranks.checkpointing.commit import Share, check_target, commit, explain
from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.checkpointing.manifest import decode_state, encode_state, parse_manifest, render_manifest
from allranks.checkpointing.parts import Parts, stored_parts, tensor_digest
from allranks.checkpointing.tensor_file import Part
from allranks.checkpointing.writing import write_file
from allranks.errors import CheckpointError
from allranks.parameter_map import Entry

_TOKEN = re.compile(r"\w{1,64}")


def save(
    directory: Path | str,
    *,
    header: Header,
    parts: Parts,
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    rank: int,
    world_size: int,
    token: str,
    device: torch.device | None = None,
    tells: bool | None = None,
) -> Checkpoint:
    """Write and commit `directory`/step-N; return on every rank after the commit.

    A checkpoint of the same run and step is replaced, by one exchange of names where the file system can do that.

    Args:
        directory: of the run's checkpoints, the same shared one on every rank; made where it is missing.
        header: what the checkpoint says of its run; the same on every rank.
        parts: this rank's local part of every tensor it holds; it writes those of which it is the `writer`.
        aliases: of tied tensors, alias -> the name that is stored; those of all ranks are joined.
        state: whatever is no tensor: None, bool, int, float, str, lists, dicts; the first rank's is kept.
        group: of the ranks that save together; None: this process alone.
        rank: this rank in the world, as in `Entry.holders`.
        world_size: the number of ranks that save.
        token: of this attempt of the run, the same on every rank.
        device: where the group's backend wants its tensors; the CPU by default.
        tells: whether this rank says what it holds, whoever writes it; one rank for each part of the model. By default
            the first one, which holds something of everything.

    Raises:
        CheckpointError: on every rank, naming rank, path and reason; what was there before is untouched.
        ProcessError: a peer was lost.
    """
    directory, device = Path(directory), device or torch.device("cpu")
    target = directory / step_name(header.step)
    temporary = directory / f"{target.name}.tmp-{token}"
    first = group is None or dist.get_rank(group) == 0
    share, kept = _attempt_share(temporary, target, header, parts, rank, aliases, state)
    share = share if (first if tells is None else tells) else replace(share, held=())
    shares = [Share(**json.loads(data)) for data in gather_bytes(json.dumps(asdict(share)).encode(), group, device)]
    answer = b""
    if first:
        try:
            if len(shares) != world_size:
                raise CheckpointError(f"{len(shares)} ranks save, {world_size} should")
            manifest = commit(temporary, target, header, shares, kept, torch.__version__)
            answer = b"saved" + render_manifest(manifest).encode()
        except Exception as error:
            answer = f"{target} was not saved: {explain(error, temporary)}; older checkpoints are untouched".encode()
    answer = broadcast_bytes(answer, group, device)
    if not answer.startswith(b"saved"):
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(answer.decode())
    return Checkpoint(target, parse_manifest(answer.removeprefix(b"saved"), str(target / MANIFEST_FILE)))


def _attempt_share(
    temporary: Path,
    target: Path,
    header: Header,
    parts: Parts,
    rank: int,
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
) -> tuple[Share, dict[str, Any]]:
    """Write this rank's file; return what it holds or why there is none, and the state to keep. Raises no Exception."""
    num_bytes = 0
    try:
        stored = stored_parts(parts)
        mine = [(entry, tensor) for entry, tensor in stored if _writes(entry, rank)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in mine)
        kept = decode_state(encode_state(state))  # refused now, and a copy that nobody changes later
        if not _TOKEN.fullmatch(temporary.name.partition(".tmp-")[2]):
            raise CheckpointError(f"{temporary.name}: a token is letters and digits")
        check_target(target, header)
        temporary.mkdir(parents=True, exist_ok=True)
        fault_points.reach("checkpoint.stage")
        held = [(entry.name, entry.dtype, entry.shape) for entry, _ in stored]
        return Share(rank, "", _write(temporary, mine, rank), _digests(mine), held, aliases), kept
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        return Share(rank, error=f"rank {rank}: {explain(error, temporary, num_bytes)}"), {}


def _writes(entry: Entry, rank: int) -> bool:
    """Whether this rank writes that box. An empty box is written only where the whole tensor is empty."""
    empty = entry.box.num_elements == 0 and math.prod(entry.shape) > 0
    return entry.writer == rank and not empty


def _write(temporary: Path, mine: Parts, rank: int) -> dict[str, Any]:
    """Write the file, if there is anything to write, and return its name and record."""
    if not mine:
        return {}
    # Wide elements first: then every element begins at a multiple of its size, and none lies across two chunks.
    ordered = sorted(mine, key=lambda pair: -pair[1].element_size())
    tensors = [(Part(entry.name, entry.dtype, entry.box, entry.shape), tensor) for entry, tensor in ordered]
    name = f"rank-{rank:05d}.safetensors"
    return {name: write_file(temporary / name, tensors).model_dump()}


def _digests(mine: Parts) -> list[tuple[Any, ...]]:
    return [
        (e.name, e.dtype, e.shape, e.box.offset, e.box.shape, tensor_digest(tensor, e.box.offset)) for e, tensor in mine
    ]
