"""From the command to the first step: ours beside `torchrun --standalone` with the same script, turn by turn.

    python bench/start.py [--nproc 2] [--rounds 7] [--quick] [--json]

The script starts the backend and finishes one step of DDP with fused AdamW on a small model. Seconds from the start of
the command until the last rank has run its first statement, has torch, has the backend and has finished the step, and
until the command has ended. `agent` is our command with the fork server, `spawned` the same without it, `train` is
`allranks train` on a small task, down to the first `step` in its journal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MOMENTS = ("statement", "torch", "backend", "step", "end")
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


def work(folder: str) -> int:
    """One rank: backend, model, one step; leaves the moments in `folder`."""
    moments = {"statement": time.time()}
    import torch
    import torch.distributed as dist

    moments["torch"] = time.time()
    dist.init_process_group("gloo")
    moments["backend"] = time.time()
    inner = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    moments["step"] = time.time()
    del model  # a DDP module that outlives its group can wait for ever (see parallel/ended_groups.py)
    dist.destroy_process_group()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(moments))
    return 0


def command(folder: str, nproc: int, method: str) -> int:
    """Our command: the fork server first, then the agent."""
    from allranks.surviving import forkserver
    from allranks.surviving.forkserver import StartMethod

    if method == "agent":
        forkserver.start(modules=["start"])  # this file, as a worker's entry
    from allranks.surviving.agent import run_workers
    from allranks.verdict import Decision

    spawned = StartMethod("spawn", Decision("workers are spawned", "this measures it"))
    chosen = forkserver.choose_start_method() if method == "agent" else spawned
    if chosen.name != {"agent": "forkserver", "spawned": "spawn"}[method]:
        print(chosen.decision, file=sys.stderr)
    outcome = run_workers(
        "start:work", (folder,), nproc=nproc, run_id="start", log_dir=Path(folder), start_method=chosen
    )
    if outcome.first_failure is not None:
        print(outcome.first_failure.render(), file=sys.stderr)
    return outcome.exit_code


def arguments(way: str, folder: Path, nproc: int) -> list[str]:
    """The command line of one way."""
    me = [str(Path(__file__).resolve())]
    if way == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        return [*torchrun, *me, "--worker", str(folder)]
    if way == "train":
        (folder / "task.py").write_text(TASK)
        allranks = [sys.executable, "-m", "allranks", "train", str(folder / "task.py"), "--run", str(folder / "run")]
        return [*allranks, "--nproc", str(nproc), "train.steps=1", "train.global_batch=16"]
    return [sys.executable, *me, "--command", str(folder), "--way", way, "--nproc", str(nproc)]


def run(way: str, nproc: int) -> dict[str, float]:
    """The moments of one start, in seconds since the command began."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.time()
        done = subprocess.run(arguments(way, folder, nproc), env=environ, capture_output=True, text=True, check=False)
        moments = {"end": time.time() - began}
        if done.returncode:
            raise RuntimeError(f"{way} ended with {done.returncode}: {done.stderr[-2000:]}")
        if way == "train":
            events = [json.loads(line) for line in (folder / "run/journal/rank-00000.jsonl").read_text().splitlines()]
            moments["step"] = next(event["t"] for event in events if event["event"] == "step") - began
            return moments
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(nproc)]
        return {name: max(rank[name] for rank in ranks) - began for name in ranks[0]} | moments


def summary(way: str, runs: list[dict[str, float]]) -> dict[str, object]:
    """The medians of one way, and the range of its first step."""
    steps = [one["step"] for one in runs]
    medians = {name: round(statistics.median(one[name] for one in runs), 2) for name in MOMENTS if name in runs[0]}
    return {
        "way": way,
        "rounds": len(runs),
        **medians,
        "step_min": round(min(steps), 2),
        "step_max": round(max(steps), 2),
    }


def main() -> int:
    """Measure and print; or be a worker, or our command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ways", default="torchrun,agent,spawned,train")
    parser.add_argument("--quick", action="store_true", help="ends within a minute")
    parser.add_argument("--json", action="store_true")
    for own in ("--worker", "--command", "--way"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker)
        os._exit(0)  # torch 2.13 aborts one exit in some twenty, in gloo's destructors; ours ends its workers so, too
    if options.command:
        return command(options.command, options.nproc, options.way)
    rounds = 2 if options.quick else options.rounds
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways.split(",")}
    for way in found:
        run(way, options.nproc)  # what the disk has cached after the first is no difference between them
    for _ in range(rounds):
        for way, runs in found.items():
            runs.append(run(way, options.nproc))
    rows = [summary(way, runs) for way, runs in found.items()]
    if options.json:
        print(json.dumps({"nproc": options.nproc, "rows": rows}))
        return 0
    names = ("way", "rounds", *MOMENTS, "step_min", "step_max")
    print("  ".join(f"{name:>9}" for name in names))
    for row in rows:
        print("  ".join(f"{row.get(name, '-')!s:>9}" for name in names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
