"""What torch's flight recorder knows of this process's collectives: where it stands in them, and when it came to each.

NCCL has a recorder of its own, the other backends share one; each keeps the last 2000, unless TORCH_FR_BUFFER_SIZE=0.
(torch/distributed/debug/_debug_handlers.py shows them as two pages; torch/csrc/distributed/c10d/FlightRecorder.hpp.)
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COALESCED = "nccl:coalesced"

Entry = Mapping[str, Any]
"""One collective, as the recorder writes it."""


def collectives_file(log: Path) -> Path:
    """Where the worker with this log writes its collectives."""
    return log.with_suffix(".collectives.json")


def write_collectives(path: Path) -> None:
    """Write what is known of this process, as one JSON object, whole or not at all.

    `groups`: `last_collectives`; `arrivals`: `find_arrivals`, none over NCCL.
    """
    groups = known_groups()
    entries, on_gpu = recorded(), recorded("_dump_nccl_trace_json")
    told = {
        "groups": last_collectives(entries, groups) + last_collectives(on_gpu, groups, numbered_by="nccl "),
        # A host comes to NCCL's when it enqueues them, long before its GPU: that says nothing of who is late.
        "arrivals": [] if on_gpu else find_arrivals(entries, groups),
    }
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(told), encoding="utf-8")
    temporary.replace(path)


def known_groups() -> Mapping[str, Sequence[int]]:
    """The ranks of each process group of this process, by its name."""
    if "torch" not in sys.modules:
        return {}
    import torch.distributed as dist

    if not dist.is_initialized():
        return {}
    known = dist.distributed_c10d._world.pg_map
    return {str(group.group_name): dist.get_process_group_ranks(group) for group in known}


def recorded(recorder: str = "_dump_fr_trace_json") -> Sequence[Entry]:
    """The collectives that one of torch's recorders keeps, oldest first; none where there is no such recorder."""
    if "torch" not in sys.modules:
        return ()
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    dump: Any = getattr(_distributed_c10d, recorder, None)
    if dump is None or not dist.is_initialized():
        return ()
    return json.loads(dump()).get("entries") or ()


def last_collectives(
    entries: Sequence[Entry], groups: Mapping[str, Sequence[int]], numbered_by: str = ""
) -> list[dict[str, object]]:
    """The collective at which each process group of this process stands: the oldest that has not ended, or the last.

    Each with `group` (its name), `axis`, `ranks`, `name`, `seq`, `p2p`, `sizes` and `waits`: whether it has not ended.

    Args:
        numbered_by: goes before the names: a group counts what each of its backends does apart.
    """
    found: dict[str, dict[str, object]] = {}
    for entry in _joined(entries):
        name, axis = entry["process_group"]
        before = found.get(name)
        if before is not None and before["waits"]:
            if before["p2p"] and entry["is_p2p"] and before["seq"] == _number(entry):  # the host stands in a batch
                before["name"] = name_batch([str(before["name"]), _name(entry)])
            continue
        found[name] = {
            "group": f"{numbered_by}{name}",
            "axis": name_axis(axis),
            "ranks": groups.get(name, []),
            "name": _name(entry),
            "seq": _number(entry),
            "p2p": entry["is_p2p"],
            "sizes": entry["input_sizes"],
            "waits": not entry["retired"] and entry["state"] != "completed",
        }
    return list(found.values())


def _joined(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with one for each batch of sends and receives: the first of it, with all names, as far as the batch
    has come.

    NCCL's recorder notes each of a batch without its end; only the entry behind them, `nccl:coalesced`, has one.
    (torch/distributed/flight_recorder/components/utils.py, find_coalesced_group; pytorch issue 137969.)
    """
    found: list[Entry | None] = []
    places: dict[str, list[int]] = {}  # group -> where its entries stand
    for entry in entries:
        own = places.setdefault(entry["process_group"][0], [])
        batch: list[int] = []
        if entry["profiling_name"] == COALESCED:
            while own and (one := found[own[-1]]) is not None and _number(one) == _number(entry):
                batch.append(own.pop())
        if batch:
            first = found[batch[-1]]
            assert first is not None
            name = name_batch([_name(found[place] or first) for place in reversed(batch)])
            found[batch[-1]] = {**first, "profiling_name": name, "retired": entry["retired"], "state": entry["state"]}
            for place in batch[:-1]:
                found[place] = None
        else:
            found.append(entry)
        own.append(batch[-1] if batch else len(found) - 1)
    return [entry for entry in found if entry is not None]


def name_batch(names: Sequence[str]) -> str:
    """One name for a batch, by which it is told from a send or receive by itself."""
    return " with ".join(dict.fromkeys(names))


def _name(entry: Entry) -> str:
    name: str = entry["profiling_name"]
    return name.partition(":")[2] or name


def _number(entry: Entry) -> int:
    number: int = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return number


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
