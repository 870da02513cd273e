"""FSDP over gloo beside DDP, by turns in the same processes: time, processor time and new pages of a step.

python bench/sharded.py [--nproc 2,4] [--turns 12] [--quick] [--json]

`allranks bench strategies` measures one strategy after the other, each beside its twin in raw torch; on a machine that
is not quiet the ratio of two strategies needs turns, too. Sides are `raw` (torch's own) and `ours`, each a step of the
10m model with two samples a process.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from allranks.benchmarking.ours import our_steps
from allranks.benchmarking.raw import raw_steps
from allranks.benchmarking.subject import make_config
from allranks.layout import Layout
from allranks.parallel.backend import choose_device, start, stop
from allranks.process_environment import LOOPBACK, ProcessEnvironment

Steps = Iterator[Callable[[], float]]

WARM_STEPS, STEPS_A_TURN, TIMEOUT_SECONDS = 4, 2, 600.0
FIRST = "ours ddp"


def make_sides(world: int, steps: int, environment: ProcessEnvironment) -> dict[str, Steps]:
    """The loops, by name; collective."""
    choice = choose_device(environment, "cpu", "auto")
    start(environment, choice, TIMEOUT_SECONDS)
    copies, shards = Layout(dp_replicate=world), Layout(dp_shard=world)
    seed = make_config(copies, steps).train.seed
    return {
        FIRST: our_steps(copies, "10m", steps, environment, choice, None),
        "ours fsdp": our_steps(shards, "10m", steps, environment, choice, None),
        "ours fsdp,grad_op": our_steps(
            Layout(dp_shard=world, sharding="grad_op"), "10m", steps, environment, choice, None
        ),
        "raw ddp": raw_steps(copies, "10m", steps, seed, choice.device),
        "raw fsdp": raw_steps(shards, "10m", steps, seed, choice.device),
    }


def measure(rank: int, world: int, turns: int, port: int, result: Path) -> None:
    """One process of a measurement; rank 0 writes the rows, means over the processes of what each turn took."""
    torch.set_num_threads(1)
    environment = ProcessEnvironment("environment", rank, rank, world, world, master_addr=LOOPBACK, master_port=port)
    sides = make_sides(world, WARM_STEPS + (turns + 1) * STEPS_A_TURN, environment)
    for side in sides.values():
        for _ in range(WARM_STEPS):
            next(side)()
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            dist.barrier()
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
            for _ in range(STEPS_A_TURN):
                loss = next(sides[name])
            loss()
            used = resource.getrusage(resource.RUSAGE_SELF)
            busy = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            spent = torch.tensor([time.perf_counter() - began, busy, used.ru_minflt - before.ru_minflt])
            dist.all_reduce(spent)
            found[name].append((spent / world / STEPS_A_TURN).tolist())
    if rank == 0:
        result.write_text(json.dumps([summarise(world, name, found) for name in sides]))
    stop()


def summarise(world: int, name: str, found: dict[str, list[list[float]]]) -> dict[str, object]:
    """Medians over the turns, and ratios to our DDP in the same turn with their quartiles."""
    wall, busy, pages = (statistics.median(column) for column in zip(*found[name], strict=True))
    pairs = list(zip(found[name], found[FIRST], strict=True))
    low, middle, high = statistics.quantiles([own[0] / first[0] for own, first in pairs], n=4)
    return {
        "processes": world,
        "side": name,
        "ms": round(1e3 * wall, 1),
        "of_ddp": round(middle, 3),
        "q1": round(low, 3),
        "q3": round(high, 3),
        "busy_ms": round(1e3 * busy, 1),
        "busy_of_ddp": round(statistics.median(own[1] / first[1] for own, first in pairs), 3),
        "new_pages": round(pages),
    }


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", default="2,4")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="two processes, three turns")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows, load = [], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        for world in [2] if asked.quick else list(map(int, asked.nproc.split(","))):
            result = Path(folder) / f"{world}.json"
            spawn(measure, (world, 3 if asked.quick else asked.turns, free_port(), result), nprocs=world)
            rows += json.loads(result.read_text())
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    if asked.json:
        print(json.dumps({"rows": rows, "load_before_and_after": loads}))
        return
    print("  ".join(f"{name:>17}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>17}" for value in row.values()))
    print(f"load before and after: {loads[0]}, {loads[1]}")


if __name__ == "__main__":
    main()
