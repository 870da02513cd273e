"""Added time per step: `allranks train`'s loop beside a raw torch loop, in the same processes, by turns.

The raw loop has torch's DataLoader, one zero_grad, backward, clip and fused AdamW step; with two processes also DDP and
the reduction of its loss and count. Ours runs with journal, TensorBoard and gradient norm, as it does by default. The
machine's speed drifts within seconds, so a turn is a tenth of a second of each, and what our writing thread has left
undone is done, and counted, before the raw loop goes on.

    python bench/overhead.py [--size tiny,10m] [--nproc 1,2] [--turns 200] [--quick] [--json]
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from allranks.config import resolve_config
from allranks.data.micro_step import StepBatch
from allranks.launching.environment import ProcessEnvironment
from allranks.observing.counters import Stopwatch
from allranks.observing.journal import Journal
from allranks.observing.memory import peak_memory_bytes
from allranks.observing.progress import ProgressLine
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice
from allranks.parallel.ended_groups import destroy_groups
from allranks.parallel.heap import keep_heap
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.training.saver import Saver
from allranks.training.trainer import Trainer
from allranks.verifying.sentinel_costs import NoSaver

sys.path.insert(0, str(Path(__file__).parent))
from gpt import SIZES, GptTask

STEPS = {"tiny": 25, "10m": 2}
"""Steps of each loop in a turn."""

TURNS = {"tiny": 200, "10m": 30}
WARM_TURNS = 2
"""Turns at the start that are not counted."""

Spent = tuple[float, float]
"""Seconds on the wall, and seconds of CPU time in all threads of this process."""


class Turns(Passes):
    """Passes that let the raw loop run every `steps` steps, and note what each of the two spent."""

    def __init__(self, steps: int, raw: Iterator[None], flush: Callable[[], None]) -> None:
        self.pairs: list[tuple[Spent, Spent]] = []
        self._steps = steps
        self._raw = raw
        self._flush = flush
        self._inner: Passes | None = None
        self._count = 0
        self._began = (0.0, 0.0)

    def around(self, inner: Passes) -> Passes:
        """These passes, around `inner`."""
        self._inner = inner
        return self

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        """As the inner one."""
        if self._count % self._steps == 0:
            self._turn()
        self._count += 1
        assert self._inner is not None
        return self._inner.run(batch, scale)

    def _turn(self) -> None:
        self._flush()
        ours = _since(self._began)
        began = _now()
        for _ in range(self._steps):
            next(self._raw)
        if self._count:
            self.pairs.append((_since(began), ours))
        self._began = _now()


def _now() -> Spent:
    return time.perf_counter(), time.process_time()


def _since(began: Spent) -> Spent:
    wall, cpu = _now()
    return wall - began[0], cpu - began[1]


def raw_loop(size: str, steps: int, world: int, rank: int) -> Iterator[None]:
    """`steps` steps of the plain loop."""
    task, batch = GptTask(size=size, samples=steps * SIZES[size].batch * world), SIZES[size].batch
    torch.manual_seed(0)
    model: torch.nn.Module = task.model()
    dataset = task.dataset("train")
    assert dataset is not None
    sampler: DistributedSampler[Any] | None = DistributedSampler(dataset, world, rank) if world > 1 else None
    loader = DataLoader(dataset, batch_size=batch, shuffle=sampler is None, sampler=sampler)
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    for sample in loader:
        optimizer.zero_grad()
        loss = task.loss(model(sample["x"]), sample) / sample["y"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told = torch.stack((loss.detach() * sample["y"].numel(), torch.tensor(float(sample["y"].numel()))))
        if world > 1:
            dist.all_reduce(told)
        told.tolist()
        yield


def our_loop(size: str, steps: int, world: int, rank: int, folder: Path) -> list[tuple[Spent, Spent]]:
    """`steps` steps of the Trainer, told to journal, TensorBoard and progress line as by default, the raw loop between.

    Returns:
        What raw and ours spent in each turn.
    """
    batch = SIZES[size].batch * world
    overrides = [f"train.steps={steps}", f"train.global_batch={batch}", "evaluate.every=0"]
    config = resolve_config(task_defaults=GptTask.defaults, toml=None, overrides=overrides)
    environment = ProcessEnvironment("environment", rank, rank, world, world)
    choice = DeviceChoice(torch.device("cpu"), "gloo", "lo", ())
    processes = gather_processes(environment, choice, resolve_layout(config, world))
    stopwatch = Stopwatch()
    recorder = progress = None
    if rank == 0:
        journal = Journal(folder / "journal.jsonl", 0)
        recorder = Recorder(
            journal,
            tensorboard=folder / "tensorboard",
            memory=lambda: peak_memory_bytes(torch.device("cpu")),
            inline=True,
        )
        progress = ProgressLine(steps)
    flush = recorder.flush if recorder is not None else lambda: None
    turns = Turns(STEPS[size], raw_loop(size, steps + STEPS[size], world, rank), flush)
    task = GptTask(size=size, samples=steps * batch)
    session = assemble(task, config, processes, stopwatch, lambda: (False, False), observe=turns.around)
    Trainer(session, cast("Saver", NoSaver()), stopwatch, recorder, progress).train()
    if recorder is not None:
        recorder.close()
    return turns.pairs[WARM_TURNS:]


def measure(rank: int, world: int, size: str, turns: int, port: int, result: Path) -> None:
    """One process of a measurement; rank 0 writes what each turn spent."""
    torch.set_num_threads(1)
    keep_heap()  # as every process of a run does; it serves both loops
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the progress line is drawn, and thrown away
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=world)
    with tempfile.TemporaryDirectory() as folder:
        pairs = our_loop(size, (turns + WARM_TURNS + 1) * STEPS[size], world, rank, Path(folder))
    if rank == 0:
        result.write_text(json.dumps(pairs))
    destroy_groups()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def row(size: str, world: int, pairs: list[tuple[Spent, Spent]]) -> dict[str, object]:
    """Medians over the turns, in milliseconds a step; the ratio's quartiles beside it."""
    a_step = 1e3 / STEPS[size]
    ratios = [ours[0] / raw[0] for raw, ours in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "size": size,
        "processes": world,
        "raw_ms": round(statistics.median(raw[0] for raw, _ in pairs) * a_step, 3),
        "ours_ms": round(statistics.median(ours[0] for _, ours in pairs) * a_step, 3),
        "ratio": round(middle, 3),
        "ratio_q1": round(low, 3),
        "ratio_q3": round(high, 3),
        "added_ms": round(statistics.median(ours[0] - raw[0] for raw, ours in pairs) * a_step, 3),
        "added_cpu_ms": round(statistics.median(ours[1] - raw[1] for raw, ours in pairs) * a_step, 3),
        "turns": len(pairs),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny,10m")
    parser.add_argument("--nproc", default="1,2")
    parser.add_argument("--turns", type=int, help="of each loop (200 of tiny, 30 of 10m)")
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for size in options.size.split(","):
        for world in map(int, options.nproc.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "turns.json"
                turns = 10 if options.quick else options.turns or TURNS[size]
                spawn(measure, (world, size, turns, free_port(), result), nprocs=world)
                rows.append(row(size, world, json.loads(result.read_text())))
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    names = list(rows[0])
    widths = {name: max(len(name), *(len(str(found[name])) for found in rows)) for name in names}
    headings: dict[str, Any] = {name: name for name in names}
    for found in (headings, *rows):
        print("  ".join(f"{found[name]!s:>{widths[name]}}" for name in names))


if __name__ == "__main__":
    main()
