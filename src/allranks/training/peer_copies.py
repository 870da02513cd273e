"""What several hosts have left of a copy in their memory, brought to the disk before a training goes on."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from allranks.checkpointing.checkpoint import Checkpoint
from allranks.checkpointing.host_memory import Record, is_distrusted, read_record, trust, write_record
from allranks.checkpointing.joining import HostPart, bring_part, is_wanted, newest_part
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


def bring_copies(memory: Path, run: Run, processes: Processes, hosts: Hosts) -> tuple[str, list[str]]:
    """Bring to the disk the newest copy that the hosts have together, where the disk has nothing as new; collective.

    All other copies go: the attempt that begins goes on from something else than they are of.

    Args:
        memory: where this host's part lies.
        run: whose attempt under way goes on from it.

    Returns:
        What was brought, in a line, or ""; and why files or all of it could not be. The same on every rank.
    """
    part = _part(memory, run) if hosts.first else None
    told = everyones(_tell(part), processes.world_group, processes.device)
    chosen, wrong = processes.share(_choose(told, run) if processes.rank == 0 else None)
    if processes.rank == 0:
        trust(run.checkpoints)  # all hosts have looked
    if hosts.first:
        clear_copies(memory, part.path if part is not None and part.seal == chosen else None)
        trust(memory)
    if part is not None and part.seal == chosen:
        try:
            wrong += bring_part(part, run.checkpoints, run.attempts)
        except (CheckpointError, OSError) as error:
            wrong.append(f"{part.path}: {error}")
    everyones_wrong = everyones(wrong, processes.world_group, processes.device)
    wrong = list(dict.fromkeys(line for lines in everyones_wrong for line in lines))
    if hosts.first:
        with suppress(RunError):  # what is there does not count for a later attempt then
            write_record(memory, Record(run.path.resolve(), (str(run.attempts),)))
    return processes.share(_see(chosen, told, run) if processes.rank == 0 else None), wrong


def _part(memory: Path, run: Run) -> HostPart | None:
    """What this host has, if the attempt before this one knew of it and no guard has found it wrong."""
    record = read_record(memory)
    if record is None or str(run.attempts - 1) not in record.attempts:
        return None
    return None if is_distrusted(memory) or is_distrusted(run.checkpoints) else newest_part(memory, run.id)


def _tell(part: HostPart | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {
        "seal": part.seal,
        "name": part.path.name,
        "newness": part.newness,
        "files": sorted(part.files()),
        "whole": len(part.manifest.files),
        "host": os.uname().nodename,
    }


def _choose(told: Sequence[dict[str, Any] | None], run: Run) -> tuple[str, list[str]]:
    """The seal of the newest copy that is whole, and newer than the disk's, or ""; and what is said of newer ones."""
    found = sorted((one for one in told if one is not None), key=lambda one: one["newness"], reverse=True)
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


def _see(chosen: str, told: Sequence[dict[str, Any] | None], run: Run) -> str:
    parts = [one for one in told if one is not None and one["seal"] == chosen]
    if not parts:
        return ""
    name, hosts = parts[0]["name"], ", ".join(sorted({one["host"] for one in parts}))
    try:
        Checkpoint.open(run.checkpoints / name, run.id)
    except CheckpointError:
        return ""
    return f"{name} came to the disk from the memory of {hosts}"
