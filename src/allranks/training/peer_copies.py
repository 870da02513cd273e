"""What several hosts have left of a copy in their memory, brought to the disk before a training goes on."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.going_on import last_to_go_on, note_going_on
from allranks.checkpointing.host_memory import Record, is_distrusted, read_record, trust, write_record
from allranks.checkpointing.joining import HostPart, bring_part, is_wanted, list_parts
from allranks.checkpointing.looking_again import PATIENCE_SECONDS, await_name
from allranks.checkpointing.peers import Hosts
from allranks.errors import CheckpointError, RunError
from allranks.run import Run
from allranks.stepping.alike import everyones
from allranks.stepping.world import Processes
from allranks.training.memory_copies import clear_copies


def hosts_of(processes: Processes) -> Hosts:
    """Which ranks share a memory; collective."""
    if processes.host is None:
        return Hosts(0, ((0,),))
    beside = dist.get_process_group_ranks(processes.host)
    of_ranks = everyones(beside, processes.world_group, processes.device)
    return Hosts(processes.rank, tuple(sorted({tuple(ranks) for ranks in of_ranks})))


def bring_copies(memory: Path | None, run: Run, processes: Processes, hosts: Hosts) -> tuple[str, list[str]]:
    """Bring to the disk the newest copy that the hosts have together, where the disk has nothing as new; collective.

    All other copies go: the attempt that begins goes on from something else than they are of. They go when it is noted
    that it does, and not before: where it dies until then, all is as it was for the next one.

    Args:
        memory: where this host's part lies; None: it has none, and hears of what the others have.
        run: whose attempt under way goes on from it.

    Returns:
        What was brought, in a line, or ""; and why files or all of it could not be. The same on every rank.

    Raises:
        CheckpointError, RunError: on rank 0: a later attempt has begun, or RUN cannot be written to.
    """
    before = processes.share(_last_attempt(run) if processes.rank == 0 else None)
    parts = _parts(memory, run, before) if memory is not None and hosts.first else []
    everyones_parts = everyones([_tell(part) for part in parts], processes.world_group, processes.device)
    told = [one for told_by_rank in everyones_parts for one in told_by_rank]
    chosen, wrong = processes.share(_choose(told, run) if processes.rank == 0 else None)
    part = next((one for one in parts if one.seal == chosen), None)
    kept = None if part is None else part.path
    if memory is not None and part is not None:
        try:
            wrong += bring_part(part, run.checkpoints, run.attempts)
        except (CheckpointError, OSError) as error:
            wrong.append(f"{part.path}: {error}")
        _note(memory, run, before, str(run.attempts))  # it counts whether or not the attempt comes to the note below
    everyones_wrong = everyones(wrong, processes.world_group, processes.device)
    wrong = list(dict.fromkeys(line for lines in everyones_wrong for line in lines))
    if processes.rank == 0:
        note_going_on(run)
        trust(run.checkpoints)  # all hosts have looked, and nothing that was made before counts any more
    name, brought = processes.share(_see(chosen, told, run, wrong) if processes.rank == 0 else None)
    if hosts.first:
        if brought:
            await_name(run.checkpoints / name)  # another host may have given it, and this one have looked before
        if memory is not None:
            clear_copies(memory, kept)
            trust(memory)
            _note(memory, run, str(run.attempts))
    return brought, wrong


def _last_attempt(run: Run) -> str:
    """The name of the attempt whose copies count: the last that went on."""
    noted = last_to_go_on(run)
    return str(run.attempts - 1 if noted is None else noted)


def _note(memory: Path, run: Run, *attempts: str) -> None:
    with suppress(RunError):  # what is there does not count for a later attempt then
        write_record(memory, Record(run.path.resolve(), attempts))


def _parts(memory: Path, run: Run, before: str) -> list[HostPart]:
    """What this host has, if the last attempt that went on knew of it and no guard has found it wrong."""
    record = read_record(memory)
    if record is None or before not in record.attempts:
        return []
    return [] if is_distrusted(memory) or is_distrusted(run.checkpoints) else list_parts(memory, run.id)


def _tell(part: HostPart) -> dict[str, Any]:
    return {
        "seal": part.seal,
        "name": part.path.name,
        "newness": part.newness,
        "files": sorted(part.files()),
        "whole": len(part.manifest.files),
        "host": os.uname().nodename,
    }


def _choose(told: Sequence[dict[str, Any]], run: Run) -> tuple[str, list[str]]:
    """The seal of the newest copy that is whole, and newer than the disk's, or ""; and what is said of newer ones."""
    found = sorted(told, key=lambda one: one["newness"], reverse=True)
    incomplete: list[str] = []
    for seal in dict.fromkeys(one["seal"] for one in found):
        parts = [one for one in found if one["seal"] == seal]
        files, whole = {name for one in parts for name in one["files"]}, parts[0]["whole"]
        if not is_wanted(tuple(parts[0]["newness"]), run.checkpoints, run.id):
            break
        if len(files) == whole:
            return seal, incomplete
        incomplete.append(
            f"{parts[0]['name']} in the memory of hosts is not whole: {len(files)} of its {whole} files are on the "
            "hosts that are here"
        )
    return "", incomplete


def _see(chosen: str, told: Sequence[dict[str, Any]], run: Run, wrong: Sequence[str]) -> tuple[str, str]:
    """The name of what was to come to the disk, and, where it is there, that it came."""
    parts = [one for one in told if one["seal"] == chosen]
    if not parts:
        return "", ""
    name, hosts = str(parts[0]["name"]), ", ".join(sorted({one["host"] for one in parts}))
    try:
        await_name(run.checkpoints / name, 0.0 if wrong else PATIENCE_SECONDS)
        Checkpoint.open(run.checkpoints / name, run.id)
    except CheckpointError:
        return name, ""
    return name, f"{name} came to the disk from the memory of {hosts}"
