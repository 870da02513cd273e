"""A run that never ends, of ours and of torchrun with torch.distributed.checkpoint, as its files show it from outside.

Both train the same tiny model under DDP and save every few steps; `recovery.py` and `hour_of_faults.py` break them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

WAYS = ("allranks", "torchrun")


def add_way(parser: argparse.ArgumentParser) -> None:
    """The option `--way`, whose value is always a list."""
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="both, unless one is named")


TASK = """
import time
import torch
import allranks
class Small(allranks.Task):
    def dataset(self, split):
        return None if split != "train" else [(torch.full((64,), i / 512), i % 8) for i in range(512)]
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    def loss(self, output, batch):
        time.sleep(PAUSE)
        return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum")
"""


@dataclass(frozen=True, slots=True)
class Program:
    """What both train.

    Attributes:
        nproc: workers.
        save_every: steps from one checkpoint to the next.
        pause: seconds that every step sleeps.
        restarts: that the launcher may make.
        timeout: seconds after which torchrun's processes give a collective up; torch's own is half an hour.
    """

    nproc: int
    save_every: int
    pause: float
    restarts: int
    timeout: float = 1800.0

    def command(self, way: str, folder: Path) -> list[str]:
        """The command line of one way; the same one starts it and continues it."""
        if way == "torchrun":
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.nproc}"]
            told = [str(folder), str(self.save_every), str(self.pause), str(self.timeout)]
            return [*launch, f"--max-restarts={self.restarts}", str(Path(__file__).resolve()), *told]
        task = folder / "task.py"
        if not task.exists():
            task.write_text(TASK.replace("PAUSE", str(self.pause)))
        command = [sys.executable, "-m", "allranks", "train", str(task), "--run", str(folder / "run")]
        keys = {"train.steps": 10_000_000, "train.global_batch": 8 * self.nproc}
        keys |= {"checkpoint.every": self.save_every, "guard.restarts": self.restarts}
        return [*command, "--nproc", str(self.nproc), "--layout", "ddp", *(f"{key}={keys[key]}" for key in keys)]

    def start(self, way: str, folder: Path) -> subprocess.Popen[bytes]:
        """Start the command of one way in a session of its own, without a word."""
        environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        silent = subprocess.DEVNULL
        command = self.command(way, folder)
        return subprocess.Popen(command, env=environ, stdout=silent, stderr=silent, start_new_session=True)


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step of rank 0: when by the clock, in which of its processes, and its number."""

    at: float
    process: str
    number: int


@dataclass
class Watched:
    """A run as its files show it; reads only what has come since.

    Attributes:
        steps: rank 0's finished steps.
        pids: rank -> process id of the newest attempt.
    """

    way: str
    folder: Path
    steps: list[Step] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    _offsets: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Read on."""
        if self.way == "torchrun":
            self.steps += [Step(at, str(pid), number) for at, pid, number in self._new(self.folder / "steps-0")]
            told = {int(path.name[4:]): path.read_text() for path in self.folder.glob("pid-*")}
            self.pids |= {rank: int(text) for rank, text in told.items() if text}
            return
        for path in sorted((self.folder / "run" / "journal").glob("rank-*.jsonl")):
            for event in self._new(path):
                if event["event"] == "start":
                    self.pids[event["rank"]] = event["pid"]
                elif event["event"] == "step":
                    self.steps.append(Step(event["t"], str(self.pids[0]), event["step"]))

    @property
    def processes(self) -> set[str]:
        """Those of rank 0 that have finished a step."""
        return {step.process for step in self.steps}

    def wait(self, before: set[str], number: int, seconds: float) -> list[Step]:
        """The steps of processes that are none of `before`, once there are `number`; [] where they do not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            found = [step for step in self.steps if step.process not in before]
            if len(found) >= number:
                return found
            time.sleep(0.02)
        return []

    def _new(self, path: Path) -> list[Any]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole = file.read().rpartition(b"\n")[0]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]


def end(command: subprocess.Popen[bytes], watched: Watched) -> None:
    """Kill the command and all that it has started, as a scheduler does where a job has ended."""
    children: list[int] = []
    with suppress(psutil.NoSuchProcess):
        children = [child.pid for child in psutil.Process(command.pid).children(recursive=True)]
    for pid in {*children, *watched.pids.values(), command.pid}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.wait()


def work(folder: Path, save_every: int, pause: float, timeout: float) -> None:
    """One rank of torchrun's: resume from the newest checkpoint that has its metadata, train for ever."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    saved = sorted(int(path.parent.name) for path in folder.glob("saved/*/.metadata"))
    step = saved[-1] if saved else 0
    if saved:
        state = {"model": inner.state_dict()}
        load(state, checkpoint_id=str(folder / "saved" / str(step)))
        inner.load_state_dict(state["model"])
    with (folder / f"steps-{rank}").open("a", buffering=1) as log:
        while True:
            inputs, targets = torch.rand(8, 64), torch.randint(8, (8,))
            optimizer.zero_grad()
            time.sleep(pause)
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            log.write(json.dumps([time.time(), os.getpid(), step]) + "\n")
            if step % save_every == 0:
                save({"model": inner.state_dict()}, checkpoint_id=str(folder / "saved" / str(step)))


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
