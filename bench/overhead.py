"""Added time per step: `allranks train`'s loop beside a raw torch loop, in the same processes, turn by turn.

The raw loop has torch's DataLoader, one zero_grad, backward, clip and fused AdamW step; with two processes also DDP and
the reduction of its loss and count. Ours runs with journal, TensorBoard and gradient norm, as it does by default.

    python bench/overhead.py [--size tiny,10m] [--nproc 1,2] [--rounds 6] [--quick] [--json]
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.training.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from gpt import SIZES, GptTask

STEPS = {"tiny": (220, 40), "10m": (14, 3)}
"""Steps of a segment, and how many of them at its start are not counted."""

Stamps = list[float]


class _Stamped(Passes):
    """Passes that note when each step begins."""

    def __init__(self, inner: Passes, stamps: Stamps) -> None:
        self._inner = inner
        self._stamps = stamps

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        """As the inner one."""
        self._stamps.append(time.perf_counter())
        return self._inner.run(batch, scale)


class _NoSaver:
    """Saving is measured elsewhere."""

    saved_step = -1

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, step: int) -> Path:
        """Nothing is written."""
        return Path()


def raw_segment(size: str, steps: int, world: int, rank: int) -> Stamps:
    """`steps` steps of the plain loop."""
    task, batch = GptTask(size=size, samples=steps * SIZES[size].batch * world), SIZES[size].batch
    torch.manual_seed(0)
    model: torch.nn.Module = task.model()
    dataset = task.dataset("train")
    assert dataset is not None
    sampler = DistributedSampler(dataset, world, rank) if world > 1 else None
    loader = DataLoader(dataset, batch_size=batch, shuffle=sampler is None, sampler=sampler)
    if world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    stamps: Stamps = []
    for sample in loader:
        stamps.append(time.perf_counter())
        optimizer.zero_grad()
        loss = task.loss(model(sample["x"]), sample) / sample["y"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        told = torch.stack((loss.detach() * sample["y"].numel(), torch.tensor(float(sample["y"].numel()))))
        if world > 1:
            dist.all_reduce(told)
        told.tolist()
    return stamps


def our_segment(size: str, steps: int, world: int, rank: int, folder: Path) -> Stamps:
    """`steps` steps of the Trainer, told to journal, TensorBoard and progress line as by default."""
    batch = SIZES[size].batch * world
    overrides = [f"train.steps={steps}", f"train.global_batch={batch}", "evaluate.every=0"]
    config = resolve_config(task_defaults=GptTask.defaults, toml=None, overrides=overrides)
    environment = ProcessEnvironment("environment", rank, rank, world, world)
    choice = DeviceChoice(torch.device("cpu"), "gloo", "lo", ())
    processes = gather_processes(environment, choice, resolve_layout(config, world))
    stamps: Stamps = []
    stopwatch = Stopwatch()
    task = GptTask(size=size, samples=steps * batch)
    session = assemble(
        task, config, processes, stopwatch, lambda: (False, False), observe=lambda passes: _Stamped(passes, stamps)
    )
    recorder = progress = None
    if rank == 0:
        journal = Journal(folder / "journal.jsonl", 0)
        recorder = Recorder(
            journal, tensorboard=folder / "tensorboard", memory=lambda: peak_memory_bytes(torch.device("cpu"))
        )
        progress = ProgressLine(steps)
    Trainer(session, _NoSaver(), stopwatch, recorder, progress).train()
    if recorder is not None:
        recorder.close()
    return stamps


def median_step(stamps: Stamps, skipped: int) -> float:
    """The median distance of two stamps in milliseconds, the first few left out."""
    distances = [1e3 * (after - before) for before, after in itertools.pairwise(stamps)]
    return statistics.median(distances[skipped:])


def measure(rank: int, world: int, size: str, rounds: int, port: int, result: Path) -> None:
    """One process of a measurement: `rounds` turns of raw and ours; rank 0 writes the medians of each turn."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the progress line is drawn, and thrown away
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=rank, world_size=world)
    steps, skipped = STEPS[size]
    turns = []
    with tempfile.TemporaryDirectory() as folder:
        our_segment(size, skipped + 2, world, rank, Path(folder))  # what is imported once is no step's cost
        for _ in range(rounds):
            raw = median_step(raw_segment(size, steps, world, rank), skipped)
            ours = median_step(our_segment(size, steps, world, rank, Path(folder)), skipped)
            turns.append((raw, ours))
    if rank == 0:
        result.write_text(json.dumps(turns))
    if world > 1:
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny,10m")
    parser.add_argument("--nproc", default="1,2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for size in options.size.split(","):
        for world in map(int, options.nproc.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                result = Path(folder) / "turns.json"
                rounds = 2 if options.quick else options.rounds
                mp.spawn(measure, (world, size, rounds, free_port(), result), nprocs=world)
                turns = json.loads(result.read_text())
            ratios = [ours / raw for raw, ours in turns]
            added = [ours - raw for raw, ours in turns]
            rows.append(
                {
                    "size": size,
                    "processes": world,
                    "raw_ms": round(statistics.median(raw for raw, _ in turns), 3),
                    "ours_ms": round(statistics.median(ours for _, ours in turns), 3),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratio_min": round(min(ratios), 3),
                    "ratio_max": round(max(ratios), 3),
                    "added_ms": round(statistics.median(added), 3),
                    "pairs": len(turns),
                }
            )
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    names = list(rows[0])
    print("  ".join(f"{name:>9}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]!s:>9}" for name in names))


if __name__ == "__main__":
    main()
