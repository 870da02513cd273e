"""Gathering and reducing over gloo: its own operations beside those that take their place (parallel/gloo_ops.py).

python bench/gloo.py [--nproc 2,4] [--rounds 10] [--quick] [--json]
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from allranks.parallel.gloo_ops import exchange_and_sum, gather_by_broadcasts
from allranks.parallel.tensor_ops import all_gather_single, reduce_scatter_single

SIZES_KB = (64, 256, 1024, 7168)


def gather_and_wait(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """By a broadcast of each rank's part."""
    gather_by_broadcasts(whole, part, group).wait()


def measure(rank: int, world: int, sizes: tuple[int, ...], rounds: int, port: int, result: Path) -> None:
    """One process of a measurement; rank 0 writes the milliseconds, the operations taking turns in every round."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    rows = []
    for size in sizes:
        whole = torch.ones(size * 256 // world * world)
        part = torch.ones(len(whole) // world)
        operations: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, whole),
            "reduce_scatter": partial(reduce_scatter_single, part, whole),
            "exchange_sum": partial(exchange_and_sum, part, whole, group, average=True),
            "all_gather": partial(all_gather_single, whole, part),
            "broadcasts": partial(gather_and_wait, whole, part, group),
        }
        spent: dict[str, list[float]] = {name: [] for name in operations}
        for turn in range(rounds + 1):
            for name, run in operations.items():
                dist.barrier()
                began = time.perf_counter()
                run()
                if turn:
                    spent[name].append(1e3 * (time.perf_counter() - began))
        rows.append({"processes": world, "kb": size} | {name: statistics.median(it) for name, it in spent.items()})
    if rank == 0:
        result.write_text(json.dumps(rows))
    dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", default="2,4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    sizes, rounds = (SIZES_KB[:2], 3) if asked.quick else (SIZES_KB, asked.rounds)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in map(int, asked.nproc.split(",")):
            result = Path(folder) / f"{world}.json"
            spawn(measure, (world, sizes, rounds, free_port(), result), nprocs=world)
            rows += json.loads(result.read_text())
    if asked.json:
        print(json.dumps({"rows": rows}))
        return
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:14.2f}" if isinstance(value, float) else f"{value:14}" for value in row.values()))


if __name__ == "__main__":
    main()
