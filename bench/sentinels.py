"""What the sentinels cost that watch over every run: by the stopwatch around their calls, in the loop of `train`.

A look is what those do that look at each step, with the line that says where the rank stands; a round is the digests of
what ranks must have alike, their exchange and what is judged of it, with what the looks of such a step do more. Here a
round follows every few steps, to have many of them; a run has one every `guard.digest_every` steps, and so it is
charged: look + round / digest_every, beside the step without a round. All on the thread that computes. A wait for the
slowest rank in the exchange is counted as the sentinels', though the next step would have waited for it, too.

    python bench/sentinels.py [--size 10m] [--runs single:1,ddp:2,fsdp:2] [--steps 60] [--quick] [--json]
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from allranks.config import Config, GuardConfig, resolve_config
from allranks.launching.environment import ProcessEnvironment
from allranks.observing.counters import Stopwatch
from allranks.parallel.backend import DeviceChoice
from allranks.parallel.ended_groups import destroy_groups
from allranks.parallel.heap import keep_heap
from allranks.stepping.session import Session, assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.verifying.sentinel_costs import WARM_ROUNDS, Begins, Costs, charged, share, train_timed

sys.path.insert(0, str(Path(__file__).parent))
from gpt import SIZES, GptTask
from overhead import free_port

GOAL = 0.01
"""Of a step."""
EVERY = 3
"""Steps between two rounds here."""
WARM = WARM_ROUNDS * EVERY
"""Steps at the start that are not counted."""


def make_session(size: str, layout: str, steps: int, world: int, rank: int, costs: Costs) -> Session:
    """That of a run of `steps` steps, with the sentinels of every run."""
    batch = SIZES[size].batch * world
    overrides = [
        f"train.steps={steps}",
        f"train.global_batch={batch}",
        "evaluate.every=0",
        f"guard.digest_every={EVERY}",
    ]
    config: Config = resolve_config(task_defaults=GptTask.defaults, toml=None, overrides=overrides, layout=layout)
    environment = ProcessEnvironment("environment", rank, rank, world, world)
    choice = DeviceChoice(torch.device("cpu"), "gloo", "lo", ())
    processes = gather_processes(environment, choice, resolve_layout(config, world))
    task = GptTask(size=size, samples=steps * batch)
    return assemble(task, config, processes, Stopwatch(), lambda: (False, False), observe=Begins(costs).around)


def measure(rank: int, world: int, size: str, layout: str, steps: int, port: int, result: Path) -> None:
    """One process of a measurement; rank 0 writes what it found."""
    torch.set_num_threads(1)
    keep_heap()  # as every process of a run does
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=world)
    costs = Costs(EVERY)
    session = make_session(size, layout, steps, world, rank, costs)
    train_timed(session, costs)
    if rank == 0:
        result.write_text(json.dumps(costs.row()))
    destroy_groups()


def describe(size: str, layout: str, world: int, found: dict[str, float]) -> dict[str, Any]:
    """A row: what a step is charged, and its part of the step, by the wall and by the processor."""
    return {
        "size": size,
        "layout": layout,
        "processes": world,
        **{name: value if isinstance(value, int) else float(f"{value:.4g}") for name, value in found.items()},
        "digest_every": GuardConfig().digest_every,
        "charged_seconds": float(f"{charged(found):.4g}"),
        "share": round(share(found), 6),
        "processor_share": round(share(found, "processor_seconds"), 6),
        "met": share(found) <= GOAL,
    }


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    name = f"{row['size']} {row['layout']}"
    step, look, whole = row["step_seconds"] * 1e3, row["look_seconds"] * 1e6, row["round_seconds"] * 1e3
    shares = f"{row['share']:>8.3%}  {row['processor_share']:>9.3%}"
    return f"{name:<12}{row['processes']:>9}  {step:>8.1f}  {look:>8.1f}  {whole:>8.2f}  {shares}  {row['rounds']:>6}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--runs", default="single:1,ddp:2,fsdp:2", help="layout:processes,...")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    steps = 5 * EVERY if options.quick else max(options.steps, WARM + 2 * EVERY)
    load, rows = [os.getloadavg()[0]], []
    for run in options.runs.split(","):
        layout, _, number = run.partition(":")
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "costs.json"
            spawn(measure, (int(number), options.size, layout, steps, free_port(), result), nprocs=int(number))
            rows.append(describe(options.size, layout, int(number), json.loads(result.read_text())))
    load.append(os.getloadavg()[0])
    if options.json:
        print(json.dumps({"goal": GOAL, "load_before": load[0], "load_after": load[1], "rows": rows}))
        return
    print(f"load {load[0]:.1f} before, {load[1]:.1f} after; a round every {rows[0]['digest_every']} steps is charged")
    print("run         processes   step ms   look us  round ms     share  processor  rounds")
    for row in rows:
        print(show(row))


if __name__ == "__main__":
    main()
