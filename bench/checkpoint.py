"""Our save and load beside torch.distributed.checkpoint and torch.save of the same bytes: two processes over gloo.

    python bench/checkpoint.py [--quick] [--json] [--rounds N] [--directory DIR]

Every rank holds half of every tensor (Shard(0)): the parameters of a transformer and two optimizer states. One round
runs every row once, each round beginning with another format; the table shows medians over rounds of the slowest rank.

    allranks   save: written, hashed, digested, synced, committed. load: every byte checked against its SHA-256.
               reshard: the same checkpoint into one process that wants whole tensors. digests: of what is in memory.
    async      stall: until a rank that saves beside its steps goes on (it copies its half); memcpy: the same bytes into
               memory that was used before. rest: from then on until the checkpoint is committed, with nothing else to
               do meanwhile; done = stall + rest. Goals: stall at most 1.5 memcpy, done at most 1.5 save.
    dcp        torch.distributed.checkpoint at its defaults: files synced, nothing checked at the load.
    torch      torch.save of each rank's tensors into its own file, synced; torch.load. No other Layout can read it.
    raw        the same bytes in one write, synced: what the disk gives.

CPU is the processor time that a rank and its threads took (it says more than seconds where others use the machine).
Peak is the resident memory that a rank needed on top of its tensors during the call (the highest of all rounds).
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORLD_SIZE = 2
FULL, QUICK = dict(layers=14, width=768, vocabulary=256), dict(layers=3, width=384, vocabulary=256)


def shapes(layers: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """A transformer's parameters, and its optimizer's two states of each."""
    model: dict[str, tuple[int, ...]] = {"embedding.weight": (vocabulary, width), "head.weight": (vocabulary, width)}
    for layer in range(layers):
        model |= {
            f"blocks.{layer}.qkv.weight": (3 * width, width),
            f"blocks.{layer}.proj.weight": (width, width),
            f"blocks.{layer}.up.weight": (4 * width, width),
            f"blocks.{layer}.down.weight": (width, 4 * width),
            f"blocks.{layer}.norm.weight": (width,),
            f"blocks.{layer}.up.bias": (4 * width,),
        }
    states = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{state}.{name}": shape for state in states for name, shape in model.items()}


class Worker:
    """One of the two ranks."""

    def __init__(self, directory: Path, quick: bool) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        from allranks.checkpointing.stage import Stage
        from allranks.parameter_map import Box, Entry

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.directory = dist.get_rank(), directory
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        torch.manual_seed(0)
        self.tensors, self.parts = {}, []
        for name, shape in shapes(**(QUICK if quick else FULL)).items():
            tensor = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
            local = tensor.to_local()
            box = Box((self.rank * shape[0] // 2, *(0 for _ in shape[1:])), tuple(local.shape))
            self.tensors[name] = tensor
            self.parts.append((Entry(name, shape, "float32", box, (self.rank,)), local))
        self.local = {entry.name: local for entry, local in self.parts}
        self.copies = [torch.empty_like(local) for _, local in self.parts]
        self.stage = Stage()
        self.under_way: Any = None  # the save that `begin` has begun
        self.num_bytes = sum(local.numel() * 4 for local in self.local.values()) * WORLD_SIZE

    def measure(self, run: Callable[[], Any]) -> list[float]:
        """Of the slowest or greediest rank: seconds, seconds of processor time, and bytes needed besides."""
        import torch
        import torch.distributed as dist

        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        dist.barrier()
        start, processor = time.perf_counter(), time.process_time()
        run()
        processor = time.process_time() - processor
        dist.barrier()
        measured = [time.perf_counter() - start, processor, resident("VmHWM") - before]
        found = torch.tensor(measured, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return list(found.tolist())

    def rows(self, round_: int) -> list[dict[str, Callable[[], Any]]]:
        """What is measured, by format; what one has written is deleted before the next, so that all get used pages."""
        import torch
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
        from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

        from allranks.checkpointing.background import BackgroundSave, World
        from allranks.checkpointing.checkpoint import Checkpoint, Header
        from allranks.checkpointing.parts import tensor_digest
        from allranks.checkpointing.portion import place_of, portion_of
        from allranks.checkpointing.restore import read_whole, restore
        from allranks.checkpointing.save import save

        place, file = self.directory / f"{round_}", self.directory / f"{round_}-{self.rank}.pt"
        header = Header("bench", 1, "fsdp", round_, 0)
        step = place / f"step-{round_:08d}"

        def write_raw() -> None:
            with open(f"{file}.raw", "wb", buffering=0) as raw:
                for local in self.local.values():
                    content: Any = local.reshape(-1).view(torch.uint8).numpy()
                    raw.write(memoryview(content))
                os.fsync(raw.fileno())

        def save_torch() -> None:
            with open(file, "wb") as output:
                torch.save(self.local, output)
                output.flush()
                os.fsync(output.fileno())

        def load_torch() -> None:
            found = torch.load(file, weights_only=True)
            for name, local in self.local.items():
                local.copy_(found[name])

        def save_ours() -> None:
            group = dist.group.WORLD
            options: dict[str, Any] = {"aliases": {}, "state": {}, "group": group, "rank": self.rank}
            save(place, header=header, parts=self.parts, world_size=WORLD_SIZE, token="bench", **options)

        def copy() -> None:
            for (_, local), copied in zip(self.parts, self.copies, strict=True):
                copied.copy_(local)

        def begin() -> None:
            portion = portion_of(self.parts, self.rank, {}, {}, tells=self.rank == 0)
            copied, ready = self.stage.copy(portion)
            world = World(dist.group.WORLD, self.rank, WORLD_SIZE, torch.device("cpu"))
            self.under_way = BackgroundSave(place_of(place, header, "beside"), copied, world, ready=ready)

        def settle() -> None:
            self.under_way.settle()

        return [
            {"raw write": write_raw},
            {"memcpy": copy, "async stall": begin, "async rest": settle},
            {"torch.save": save_torch, "torch.load": load_torch},
            {
                "dcp.save": lambda: save_dcp(self.tensors, checkpoint_id=place / "dcp"),
                "dcp.load": lambda: load_dcp(self.tensors, checkpoint_id=place / "dcp"),
            },
            {
                "allranks save": save_ours,
                "allranks load": lambda: restore(Checkpoint.open(step), self.parts),
                "allranks reshard 2 to 1": lambda: self.rank or read_whole(Checkpoint.open(step), ""),
                "allranks digests": lambda: [tensor_digest(local, entry.box.offset) for entry, local in self.parts],
            },
        ]

    def run(self, rounds: int) -> None:
        """All rounds; the first rank prints one JSON line."""
        import warnings

        import torch.distributed as dist

        warnings.filterwarnings("ignore")
        found: dict[str, list[list[float]]] = {}
        for round_ in range(rounds + 1):
            formats = self.rows(round_)
            for at in range(len(formats)):
                for name, run in formats[(at + round_) % len(formats)].items():
                    measured = self.measure(run)
                    if round_:  # the first warms up
                        found.setdefault(name, []).append(measured)
                dist.barrier()
                if self.rank == 0:
                    for path in self.directory.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                dist.barrier()
        if self.rank == 0:
            print(json.dumps({"bytes": self.num_bytes, "rounds": rounds, "rows": found}))
        dist.destroy_process_group()


def resident(field: str) -> int:
    """Bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def launch(arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Start the ranks and return what the first one printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, __file__, "--worker", directory, "--rounds", str(arguments.rounds)]
    command += ["--quick"] if arguments.quick else []
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        sys.exit("a rank failed")
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios that matter."""
    beside = zip(found["rows"]["async stall"], found["rows"]["async rest"], strict=True)
    done = [[a[0] + b[0], a[1] + b[1], max(a[2], b[2])] for a, b in beside]
    found["rows"]["async done"] = done
    rows = {
        name: {
            "seconds": statistics.median(seconds for seconds, _, _ in measured),
            "slowest": max(seconds for seconds, _, _ in measured),
            "cpu_seconds": statistics.median(processor for _, processor, _ in measured),
            "peak_bytes": max(peak for _, _, peak in measured),
        }
        for name, measured in found["rows"].items()
    }
    pairs = {
        "save / raw write": ("allranks save", "raw write"),
        "async stall / memcpy": ("async stall", "memcpy"),
        "async done / save": ("async done", "allranks save"),
        "save / dcp.save": ("allranks save", "dcp.save"),
        "save / torch.save": ("allranks save", "torch.save"),
        "load / dcp.load": ("allranks load", "dcp.load"),
        "load / torch.load": ("allranks load", "torch.load"),
    }
    ratios = {
        name: {what: rows[a][what] / rows[b][what] for what in ("seconds", "cpu_seconds")}
        for name, (a, b) in pairs.items()
    }
    return {"bytes": found["bytes"], "rounds": found["rounds"], "rows": rows, "ratios": ratios}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="65 MB instead of 600 MB")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to be measured; a temporary one by default")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        Worker(Path(arguments.worker), arguments.quick).run(arguments.rounds)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        summary = summarise(launch(arguments, directory))
    if arguments.json:
        print(json.dumps(summary))
        return
    print(f"{summary['bytes'] / 1e6:.0f} MB, {WORLD_SIZE} processes, {summary['rounds']} rounds")
    print(f"{'':26}{'median s':>10}{'slowest s':>11}{'GB/s':>8}{'CPU s':>8}{'peak MB':>9}")
    for name, row in summary["rows"].items():
        rate, peak = summary["bytes"] / row["seconds"] / 1e9, row["peak_bytes"] / 1e6
        print(f"{name:26}{row['seconds']:10.3f}{row['slowest']:11.3f}{rate:8.2f}{row['cpu_seconds']:8.3f}{peak:9.1f}")
    for name, ratio in summary["ratios"].items():
        print(f"{name:26}{ratio['seconds']:9.2f}x{ratio['cpu_seconds']:26.2f}x")


if __name__ == "__main__":
    main()
