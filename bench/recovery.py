"""From the kill of a worker to the next finished step: ours beside torchrun with torch.distributed.checkpoint.

    python bench/recovery.py [--nproc 2] [--kills 100] [--quick] [--json]

A tiny model under DDP saves every five steps. Again and again a worker (each rank in turn) gets SIGKILL at a random
moment, at least three steps after the recovery before; the seconds are those from the kill until rank 0 has finished a
step of the attempt after it. A kill after which no step comes within a minute is not recovered, and ends its way.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

WAYS = ("allranks", "torchrun")
PATIENCE_SECONDS = 60.0
START_SECONDS = 180.0
STEPS_BETWEEN = 3
SAVE_EVERY = 5
COLUMNS = ("way", "kills", "recovered", "median", "worst")
TASK = """
import torch
import allranks
class Small(allranks.Task):
    def dataset(self, split):
        return None if split != "train" else [(torch.full((64,), i / 512), i % 8) for i in range(512)]
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    def loss(self, output, batch):
        return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum")
"""


def work(folder: Path) -> None:
    """One rank of torchrun's: resume from the newest checkpoint that has its metadata, train for ever."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
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
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            step += 1
            log.write(json.dumps([time.time(), attempt, step]) + "\n")
            if step % SAVE_EVERY == 0:
                save({"model": inner.state_dict()}, checkpoint_id=str(folder / "saved" / str(step)))


def arguments(way: str, folder: Path, nproc: int, kills: int) -> list[str]:
    """The command line of one way."""
    if way == "torchrun":
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        return [*launch, f"--max-restarts={kills + 1}", str(Path(__file__).resolve()), "--worker", str(folder)]
    (folder / "task.py").write_text(TASK)
    command = [sys.executable, "-m", "allranks", "train", str(folder / "task.py"), "--run", str(folder / "run")]
    wanted = (
        "train.steps=10000000",
        "train.global_batch=16",
        f"checkpoint.every={SAVE_EVERY}",
        f"guard.restarts={kills}",
    )
    return [*command, "--nproc", str(nproc), "--layout", "ddp", *wanted]


class Watched:
    """A run as its files show it; reads only what has come since.

    Attributes:
        steps: rank 0's finished steps as (time, attempt, step).
        pids: rank -> process id of the newest attempt.
    """

    def __init__(self, way: str, folder: Path) -> None:
        self.steps: list[tuple[float, int, int]] = []
        self.pids: dict[int, int] = {}
        self._way, self._folder = way, folder
        self._offsets: dict[Path, int] = {}
        self._attempts: dict[Path, int] = {}

    def look(self) -> None:
        """Read on."""
        if self._way == "torchrun":
            self.steps += [
                (float(t), int(attempt), int(step)) for t, attempt, step in self._new(self._folder / "steps-0")
            ]
            self.pids = {int(path.name[4:]): int(path.read_text() or 0) for path in self._folder.glob("pid-*")}
            return
        for path in sorted((self._folder / "run" / "journal").glob("rank-*.jsonl")):
            for event in self._new(path):
                if event["event"] == "start":
                    self._attempts[path], self.pids[event["rank"]] = event["attempt"], event["pid"]
                elif event["event"] == "step":
                    self.steps.append((event["t"], self._attempts[path], event["step"]))

    def _new(self, path: Path) -> list[Any]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole = file.read().rpartition(b"\n")[0]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + bool(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def wait(self, attempt: int, number: int, seconds: float) -> list[tuple[float, int, int]]:
        """The steps of attempts after `attempt` once there are `number` of them; [] when they do not come."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            found = [one for one in self.steps if one[1] > attempt]
            if len(found) >= number:
                return found
            time.sleep(0.02)
        return []


def measure(way: str, nproc: int, kills: int, seed: int) -> list[float]:
    """Seconds of each recovery; fewer than `kills` where one did not come."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = subprocess.Popen(
            arguments(way, folder, nproc, kills),
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return kill_again_and_again(Watched(way, folder), nproc, kills, random.Random(seed))
        finally:
            for pid in [child.pid for child in psutil.Process(command.pid).children(recursive=True)] + [command.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            command.wait()


def kill_again_and_again(watched: Watched, nproc: int, kills: int, generator: random.Random) -> list[float]:
    """The seconds of each recovery, up to the first that does not come."""
    seconds, attempt = list[float](), -1
    for kill in range(kills):
        found = watched.wait(attempt, STEPS_BETWEEN, PATIENCE_SECONDS if kill else START_SECONDS)
        if not found:
            break
        attempt = found[-1][1]
        time.sleep(generator.random() * 0.1)
        killed = time.time()
        os.kill(watched.pids[kill % nproc], signal.SIGKILL)
        after = watched.wait(attempt, 1, PATIENCE_SECONDS)
        if not after:
            break
        seconds.append(after[0][0] - killed)
    return seconds


def summary(way: str, seconds: list[float], kills: int) -> dict[str, object]:
    """One row."""
    row: dict[str, object] = {"way": way, "kills": kills, "recovered": len(seconds)}
    if seconds:
        row |= {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}
    return row


def main() -> None:
    """Measure both ways and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5 kills")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", type=Path)
    chosen = parser.parse_args()
    if chosen.worker is not None:
        work(chosen.worker)
        return
    kills = 5 if chosen.quick else chosen.kills
    rows = [summary(way, measure(way, chosen.nproc, kills, chosen.seed), kills) for way in WAYS]
    if chosen.json:
        print(json.dumps({"nproc": chosen.nproc, "rows": rows}))
        return
    headings: dict[str, Any] = dict(zip(COLUMNS, COLUMNS, strict=True))
    for names in [headings, *rows]:
        print("  ".join(f"{names.get(name, '-')!s:>9}" for name in COLUMNS))


if __name__ == "__main__":
    main()
