"""Saving a checkpoint from shards: every rank writes its boxes, the first one commits, and it is whole or absent (law
9).

    every rank    step-N.tmp-<token>/rank-R.safetensors, written, hashed and synced
    exchange      what each has written, or why it could not
    first rank    manifest.json, COMMITTED, the directory synced; renamed to step-N; the parent synced
    exchange      the manifest, or why there is none: every rank returns, or every rank raises

No rank stops between two exchanges: what fails on one is carried to all, so none waits for another that has given up.
An error that is none of the save's, which the first rank only meets here, ends that rank as it would anywhere else.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from allranks.checkpointing.checkpoint import MANIFEST_FILE, Checkpoint, Header
from allranks.checkpointing.commit import Share, commit, explain
from allranks.checkpointing.exchange import broadcast_bytes, gather_bytes
from allranks.checkpointing.manifest import parse_manifest, render_manifest
from allranks.checkpointing.parts import Parts
from allranks.checkpointing.portion import Place, Portion, failed_share, place_of, portion_of, write_portion
from allranks.errors import CheckpointError, RunError
from allranks.recorded import note_device_error

NOT_SAVED: Final = "was not saved"
"""In the error of a checkpoint of which nothing is there: errors travel between ranks as their words."""


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
    before_commit: Callable[[], None] = lambda: None,
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
        before_commit: called on the first rank; its RunError keeps the checkpoint from being one, else `why_refused`.

    Raises:
        CheckpointError: on every rank, naming rank, path and reason; what was there before is untouched.
        ProcessError: a peer was lost.
    """
    device, place = device or torch.device("cpu"), place_of(directory, header, token)
    first = group is None or dist.get_rank(group) == 0
    tells = first if tells is None else tells
    portion, share = write_own(place, parts, rank, aliases, state, tells=tells, looks=first)
    shares = gather_shares(share, group, device)
    answer, refused = b"", why_refused(before_commit) if first else None
    if first:
        try:
            if len(shares) != world_size:
                raise CheckpointError(f"{len(shares)} ranks save, {world_size} should")
            if refused is not None:
                raise refused
            manifest = commit(place.temporary, place.target, header, shares, portion.state, torch.__version__)
            answer = b"saved" + render_manifest(manifest).encode()
        except Exception as error:
            answer = refusal(place, explain(error, place.temporary)).encode()
    answer = broadcast_bytes(answer, group, device)
    if not answer.startswith(b"saved"):
        give_up(place, group, device)
        raise CheckpointError(answer.decode())
    manifest = parse_manifest(answer.removeprefix(b"saved"), str(place.target / MANIFEST_FILE))
    return Checkpoint(place.target, manifest)


def why_refused(before_commit: Callable[[], None]) -> RunError | None:
    """Call it; the RunError that keeps a checkpoint from being one. Whatever else it raises is no failure of the save:
    another one would meet it too, and who bore it would look for the fault at the disk. So it ends this
    rank, whose loss the others meet.
    """
    try:
        before_commit()
    except RunError as error:
        return error
    return None


def write_own(
    place: Place,
    parts: Parts,
    rank: int,
    aliases: Mapping[str, str],
    state: Mapping[str, Any],
    *,
    tells: bool,
    looks: bool = True,
) -> tuple[Portion, Share]:
    """Write this rank's portion of a checkpoint; arguments as of `save` and `write_portion`. Raises no Exception: the
    Share tells.
    """
    try:
        portion = portion_of(parts, rank, aliases, state, tells=tells)
        return portion, write_portion(place, portion, looks=looks)
    except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
        note_device_error(error)
        return Portion(rank), failed_share(place, rank, error)


def gather_shares(share: Share, group: dist.ProcessGroup | None, device: torch.device) -> list[Share]:
    """Every rank's Share on the group's first rank; an empty list elsewhere. As `gather_bytes`."""
    return [Share(**json.loads(data)) for data in gather_bytes(json.dumps(asdict(share)).encode(), group, device)]


def give_up(place: Place, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Delete what was written of a checkpoint that there will not be; collective. No rank returns before all have: the
    next try of the same step writes to the same place.

    Raises:
        ProcessError: a peer was lost.
    """
    shutil.rmtree(place.temporary, ignore_errors=True)
    gather_bytes(b"", group, device)


def refusal(place: Place, reason: str) -> str:
    """What every rank raises where a checkpoint could not be saved."""
    return f"{place.target} {NOT_SAVED}: {reason}; older checkpoints are untouched"
