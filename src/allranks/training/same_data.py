"""Whether all ranks, and a run and its resume, see the same data: a few samples are compared (data/fingerprint.py)."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.data.fingerprint import UNREADABLE, Fingerprint, digest_at, find_others, take_fingerprint
from allranks.data.stream import DataStream
from allranks.errors import AllranksError, CheckpointError, DataError
from allranks.stepping.alike import everyones
from allranks.stepping.same_code import digest_of
from allranks.stepping.world import Processes
from allranks.verdict import Decision

KEPT, SEED = "fingerprint", "fingerprint_seed"
"""Their keys in what a checkpoint keeps of the dataset: the digests, and the seed under which samples were drawn."""

GO_ON = "guard.data=warn goes on with it"
NOT_COMPARED = "samples are not compared with other ranks' or earlier ones"


@final
@dataclass(frozen=True, slots=True)
class SameData:
    """What was found.

    Attributes:
        fingerprint: rank 0's, the same on every rank; {} where nobody looks, or nothing can be looked at.
        warnings: what is not alike, where that ends nothing.
        decisions: why something was not looked at.
    """

    fingerprint: Fingerprint = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()


def compare_data(
    stream: DataStream, checkpoint: Checkpoint | None, processes: Processes, follows: Literal["stop", "warn", "off"]
) -> SameData:
    """Compare the data of all ranks, and then with what the checkpoint was written from; collective.

    Args:
        follows: guard.data.

    Raises:
        DataError: on every rank, naming the first sample that another rank has otherwise, and that rank.
        CheckpointError: on every rank, naming the first sample that is not what it was.
    """
    if follows == "off":
        return SameData()
    told = _tell_each_other(take_fingerprint(stream), processes)
    now: Fingerprint = told[0][1]
    kept = {} if checkpoint is None else _kept(checkpoint, stream)
    found: list[tuple[str, type[AllranksError], str]] = []
    for rank, (host, theirs) in enumerate(told):
        if others := find_others(now, theirs):
            found.append((others[0], DataError, _of_ranks(others, theirs, rank, host, len(now))))
            break
    if checkpoint is not None and (others := find_others(kept, now)):
        found.append((others[0], CheckpointError, _of_before(others, now, checkpoint)))
    for number, error, what in found:
        if not _is_the_same_twice(stream, int(number), processes):
            because = f"dataset('train')[{number}] is another one each time it is loaded"
            return SameData(decisions=(Decision(NOT_COMPARED, because),))
        if follows == "stop":
            raise error(f"{what} ({GO_ON})")
    return SameData(now, tuple(what for *_, what in found))


def _tell_each_other(mine: Fingerprint, processes: Processes) -> list[tuple[str, Fingerprint]]:
    """By rank, its host and what it has found, on every rank; rank 0's alone where all have found the same: of
    thousands of ranks none says more than one digest then. Collective.
    """
    host = socket.gethostname()
    whole = digest_of(json.dumps(mine, sort_keys=True).encode())
    if len(set(everyones(whole, processes.world_group, processes.device))) == 1:
        return [(host, mine)]
    return [(host, found) for host, found in everyones([host, mine], processes.world_group, processes.device)]


def keep(fingerprint: Fingerprint, stream: DataStream) -> dict[str, Any]:
    """What a checkpoint keeps of it; {} of none."""
    return {KEPT: dict(fingerprint), SEED: stream.seed} if fingerprint else {}


def _kept(checkpoint: Checkpoint, stream: DataStream) -> Fingerprint:
    """What the checkpoint has of it; {} where it has none, where samples that draw are others by their seed, or where
    the dataset is of another length, which is refused elsewhere.
    """
    before = checkpoint.manifest.state.get("dataset", {})
    alike = {"num_samples": stream.num_samples, SEED: stream.seed}
    same = isinstance(before, Mapping) and all(before.get(name) == value for name, value in alike.items())
    kept = before.get(KEPT, {}) if same else {}
    return {str(one): str(digest) for one, digest in kept.items()} if isinstance(kept, Mapping) else {}


def _of_ranks(others: list[str], theirs: Fingerprint, rank: int, host: str, looked_at: int) -> str:
    return (
        f"{_name(others[0], theirs)} on rank {rank} ({host}) than on rank 0, {_count(others, looked_at)}: every "
        f"process has to see the same data; compare the copies on the hosts"
    )


def _of_before(others: list[str], now: Fingerprint, checkpoint: Checkpoint) -> str:
    return (
        f"{_name(others[0], now)} than when {checkpoint.path.name} was written, {_count(others, len(now))}: the data "
        f"was damaged or replaced meanwhile; bring the old data back, or start a new run"
    )


def _name(number: str, digests: Fingerprint) -> str:
    why = digests[number]
    if why.startswith(UNREADABLE):
        return f"dataset('train')[{number}] cannot be read ({why.removeprefix(UNREADABLE)}), other"
    return f"dataset('train')[{number}] is another sample"


def _count(others: list[str], looked_at: int) -> str:
    return f"{len(others)} of {looked_at} that were looked at"


def _is_the_same_twice(stream: DataStream, number: int, processes: Processes) -> bool:
    """Whether every rank loads the same sample two times running; collective."""
    same = digest_at(stream, number) == digest_at(stream, number)
    return all(everyones(same, processes.world_group, processes.device))


def tell_data(found: SameData, warn: Callable[[str, str], None]) -> tuple[Decision, ...]:
    """Say what is not alike; the decisions."""
    for line in found.warnings:
        warn(line, "see where the copy comes from that a run should read; guard.data=off looks no more")
    return found.decisions
