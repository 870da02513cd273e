"""What torch's flight recorder knows of this process's collectives: where it stands in them, and when it came to each.

The recorder keeps the last 2000 of every backend, unless TORCH_FR_BUFFER_SIZE=0.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Entry = Mapping[str, Any]
"""One collective, as the recorder writes it."""


def collectives_file(log: Path) -> Path:
    """Where the worker with this log writes its collectives."""
    return log.with_suffix(".collectives.json")


def write_collectives(path: Path) -> None:
    """Write what is known of this process, as one JSON object, whole or not at all.

    `groups`: `last_collectives`; `arrivals`: `find_arrivals`.
    """
    entries, groups = recorded()
    told = {"groups": last_collectives(entries, groups), "arrivals": find_arrivals(entries, groups)}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(told), encoding="utf-8")
    temporary.replace(path)


def recorded() -> tuple[Sequence[Entry], Mapping[str, Sequence[int]]]:
    """The collectives that are kept, oldest first, and the ranks of each process group by its name."""
    if "torch" not in sys.modules:
        return (), {}
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    recorder: Any = _distributed_c10d
    if not dist.is_initialized():
        return (), {}
    known = dist.distributed_c10d._world.pg_map
    groups = {str(group.group_name): dist.get_process_group_ranks(group) for group in known}
    return json.loads(recorder._dump_fr_trace_json()).get("entries", []), groups


def last_collectives(entries: Sequence[Entry], groups: Mapping[str, Sequence[int]]) -> list[dict[str, object]]:
    """The collective at which each process group of this process stands: the oldest that has not ended, or the last.

    Each with `group` (its name), `axis`, `ranks`, `name`, `seq`, `p2p`, `sizes` and `waits`: whether it has not ended.
    """
    found: dict[str, dict[str, object]] = {}
    for entry in entries:
        name, axis = entry["process_group"]
        before = found.get(name)
        if before is not None and before["waits"]:
            continue
        found[name] = {
            "group": name,
            "axis": name_axis(axis),
            "ranks": groups.get(name, []),
            "name": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "seq": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "p2p": entry["is_p2p"],
            "sizes": entry["input_sizes"],
            "waits": not entry["retired"] and entry["state"] != "completed",
        }
    return list(found.values())


def find_arrivals(entries: Sequence[Entry], groups: Mapping[str, Sequence[int]]) -> list[tuple[str, int, int]]:
    """When this process came to each collective among several ranks: (group, number, ns of the host's clock).

    Sends and receives are left out: what the stages of a pipeline do differs.
    """
    return [
        (name, entry["collective_seq_id"], entry["time_created_ns"])
        for entry in entries
        if not entry["is_p2p"] and len(groups.get(name := entry["process_group"][0], ())) > 1
    ]


def name_axis(description: str) -> str:
    """The axis of a process group, from torch's description of it; "all ranks" for the world."""
    return "all ranks" if description in ("", "default_pg", "undefined") else description.removeprefix("mesh_")
