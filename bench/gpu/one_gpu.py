"""What one GPU has to show: a 1B-parameter transformer beside a raw compiled loop, and the modes that need CUDA.

Speed: sequences of 4,096 tokens, bfloat16, blocks compiled, in a process of its own each time, raw and ours by turns;
the first steps, which compile, are not counted. Mfu takes 6 * parameters + 12 * layers * width * sequence operations a
token (PaLM, arXiv 2204.02311, appendix B) over the device's dense bfloat16 peak. Checks: short runs of the real command
under each mode, held to the loss of the same run in float32; then the tests marked gpu, and the smoke subset. What all
of it is held to stands in verdicts.py; exit code 1: something is not.

    python bench/gpu/one_gpu.py [--rounds 2] [--steps 20] [--only speed,checks,tests] [--jobs 1] [--json FILE]
    python bench/gpu/one_gpu.py --device cpu --tiny      that the program itself works
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from language import SIZES, Language, Size, Tokens
from modes import check_modes, read_losses
from torch import nn
from verdicts import judge_speed, row

from allranks.config import resolve_config
from allranks.data.micro_step import StepBatch
from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key
from allranks.launching.environment import ALONE
from allranks.observing.counters import Stopwatch
from allranks.observing.journal import Journal
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.training.saver import Saver
from allranks.training.trainer import Trainer
from allranks.verifying.sentinel_costs import NoSaver

PEAK_TFLOPS: Mapping[str, float] = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, without sparsity, of the SXM parts: NVIDIA's data sheets."""

WARM_STEPS = 5


class Clock(Passes):
    """Passes that note when the first counted step begins."""

    def __init__(self, synchronise: Callable[[], None]) -> None:
        self.began = self.ended = 0.0
        self._synchronise = synchronise
        self._count = 0
        self._inner: Passes | None = None

    def around(self, inner: Passes) -> Passes:
        """These passes, around `inner`."""
        self._inner = inner
        return self

    def begin(self) -> None:
        """The counted steps begin."""
        self._synchronise()
        self.began = time.perf_counter()

    def end(self) -> None:
        """They have ended."""
        self._synchronise()
        self.ended = time.perf_counter()

    def run(self, batch: StepBatch, scale: Scale) -> Iterator[StepSums]:
        """As the inner one."""
        if self._count == WARM_STEPS:
            self.begin()
        self._count += 1
        assert self._inner is not None
        return self._inner.run(batch, scale)


def train_raw(task: Language, size: Size, device: torch.device, steps: int, clock: "Clock") -> list[float]:
    """The loop that one would write by hand, over the batches that ours takes; the loss of each step."""
    torch.manual_seed(0)
    model = task.model().to(device)
    for block in model.get_submodule("layers").children():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, fused=True)
    tokens, losses = Tokens(size), []
    order = permute(len(tokens), epoch_key(0, 0), np.arange(steps * size.batch)).tolist()
    data = torch.utils.data.Subset(tokens, order)
    loader = iter(torch.utils.data.DataLoader(data, batch_size=size.batch, pin_memory=device.type == "cuda"))
    for step in range(steps):
        if step == WARM_STEPS:
            clock.begin()
        batch = {name: part.to(device, non_blocking=True) for name, part in next(loader).items()}
        with torch.autocast(device.type, torch.bfloat16):
            output = model(batch["x"])
        loss = task.loss(output.float(), batch) / batch["y"].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())  # read when the clock has stopped
    clock.end()
    return [loss.item() for loss in losses]


def train_ours(task: Language, size: Size, device: torch.device, steps: int, clock: Clock, folder: Path) -> list[float]:
    """The Trainer as the command runs it, with journal and TensorBoard; the loss of each step."""
    overrides = [
        f"train.steps={steps}",
        f"train.global_batch={size.batch}",
        "train.precision=bfloat16",
        f"optimizer.lr={size.lr}",
    ]
    config = resolve_config(
        task_defaults=task.defaults, toml=None, overrides=[*overrides, f"task.size={task.size}"], layout="compile=block"
    )
    processes = gather_processes(ALONE, DeviceChoice(device, "gloo", None, ()), resolve_layout(config, 1))
    stopwatch, journal = Stopwatch(), Journal(folder / "journal.jsonl", 0)
    recorder = Recorder(journal, tensorboard=folder / "tensorboard", inline=device.type == "cpu")
    session = assemble(task, config, processes, stopwatch, lambda: (False, False), observe=clock.around)
    Trainer(session, cast("Saver", NoSaver()), stopwatch, recorder, None).train()
    clock.end()
    recorder.close()  # once a run: no part of a step
    return read_losses(folder / "journal.jsonl")


def measure(kind: str, name: str, device: torch.device, steps: int) -> dict[str, Any]:
    """One process: seconds a step, the peak of what torch has allocated, and the losses."""
    size, task, total = SIZES[name], Language(size=name), steps + WARM_STEPS
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = Clock(synchronise)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "raw":
            losses = train_raw(task, size, device, total, clock)
        else:
            losses = train_ours(task, size, device, total, clock, Path(folder))
    seconds = (clock.ended - clock.began) / steps
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    with torch.device("meta"):
        parameters = sum(p.numel() for p in task.model().parameters())
    return {"seconds": seconds, "peak_bytes": float(peak), "parameters": float(parameters), "losses": losses}


def compare_speed(name: str, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Raw and ours by turns, each in a process of its own; medians."""
    found: dict[str, list[dict[str, Any]]] = {"raw": [], "ours": []}
    for _ in range(rounds):
        for kind, rows in found.items():
            command = [sys.executable, __file__, "--one", kind, "--size", name, "--device", str(device)]
            told = subprocess.run([*command, "--steps", str(steps)], check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(told.stdout.splitlines()[-1]))
            told_of = {key: value for key, value in rows[-1].items() if key != "losses"}
            print(f"{kind:16} {told_of}", file=sys.stderr, flush=True)
    size = SIZES[name]
    seconds = {kind: statistics.median(row["seconds"] for row in rows) for kind, rows in found.items()}
    peak = {kind: max(row["peak_bytes"] for row in rows) for kind, rows in found.items()}
    parameters = found["raw"][0]["parameters"]
    a_token = 6 * parameters + 12 * size.layers * size.width * size.seq
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    tflops = size.batch * size.seq * a_token / seconds["ours"] / 1e12
    top = next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)
    return {
        "size": name,
        "device": device_name,
        "torch": torch.__version__,
        "parameters": int(parameters),
        "seconds": seconds,
        "speed_of_raw": seconds["raw"] / seconds["ours"],
        "memory_of_raw": peak["ours"] / peak["raw"] if peak["raw"] else None,
        "tflops": tflops,
        "mfu": None if top is None else tflops / top,
        "peak_bytes": peak,
        "losses": {kind: rows[-1]["losses"] for kind, rows in found.items()},
    }


def run_tests() -> Iterator[dict[str, Any]]:
    """The tests marked gpu, and the smoke subset (tests/smoke.py), which says whether this torch is one that works.

    The latter on the processor: whether it is right on a GPU, it does not say.
    """
    root = Path(__file__).parents[2]
    # tests/conftest.py hides the GPU from all tests but those marked gpu.
    subsets = {"tests marked gpu": ("-m", "gpu"), "smoke subset, GPU hidden": ("-m", "smoke")}
    for what, arguments in subsets.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        lines = ran.stdout.strip().splitlines() or [""]
        yield row(what, ran.returncode == 0, None, lines[-1])


def main() -> None:
    """Measure, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers: whether the program works")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, 17), help="modes that are checked at a time")
    parser.add_argument("--only", default="speed,checks,tests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", choices=("raw", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--size", default="1b", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device, parts = torch.device(options.device), options.only.split(",")
    if options.one:
        print(json.dumps(measure(options.one, options.size, device, options.steps)))
        return
    document: dict[str, Any] = {}
    if "speed" in parts:
        document["speed"] = compare_speed("tiny" if options.tiny else "1b", device, options.rounds, options.steps)
        for name, value in document["speed"].items():
            print(f"{name:16} {value}", flush=True)
    rows = document["checks"] = list[dict[str, Any]]()
    found = [judge_speed(document["speed"])] if "speed" in parts else []
    found += [check_modes(device, options.steps, options.jobs)] if "checks" in parts else []
    found += [run_tests()] if "tests" in parts else []
    for judged in itertools.chain.from_iterable(found):
        rows.append(judged)
        loss = "" if judged["loss"] is None else f"{judged['loss']:.4f}"
        verdict = {True: "ok", False: "NO", None: "--"}[judged["ok"]]
        print(f"{verdict:3} {judged['what']:42} {loss:8} {judged['said']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(1 if any(judged["ok"] is False for judged in rows) else 0)


if __name__ == "__main__":
    main()
