"""What one GPU has to show: a 1B-parameter transformer beside a raw compiled loop, and the modes that need CUDA.

Speed: sequences of 4,096 tokens, bfloat16, blocks compiled, in a process of its own each time, raw and ours by turns;
the first steps, which compile, are not counted. Mfu takes 6 * parameters + 12 * layers * width * sequence operations a
token (PaLM, arXiv 2204.02311, appendix B) over the device's dense bfloat16 peak. Checks: short runs of the real command
under each mode, held to the loss of the same run in float32; then the tests marked gpu, and the smoke subset. What all
of it is held to stands in verdicts.py; exit code 1: something is not.

    python bench/gpu/one_gpu.py [--rounds 2] [--steps 20] [--only speed,checks,tests] [--json FILE]
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
from ring_kernels import check_ring
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from verdicts import judge_mode, judge_speed, row

from allranks.config import resolve_config
from allranks.data.micro_step import StepBatch
from allranks.data.permutation import permute
from allranks.data.random_keys import epoch_key
from allranks.launching.environment import ALONE
from allranks.observing.counters import Stopwatch
from allranks.observing.journal import Journal
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice
from allranks.run import Run
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


def read_losses(journal: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in map(json.loads, journal.read_text().splitlines()) if line["event"] == "step"]


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


WIDE = ("task.size=wide", "optimizer.lr=0.003")
CHECKS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("train.precision=bfloat16",),
    "float16": ("train.precision=float16",),
    "float8": ("train.precision=float8", "layout.compile=block"),
    "compile=block": ("train.precision=bfloat16", "layout.compile=block"),
    "recompute=full": ("layout.recompute=full",),
    "float32, wide": (*WIDE,),
    "offload=activations": ("layout.offload=activations", *WIDE),
    # Two processes on the one GPU, which speak through gloo: shards need a second one.
    "offload=parameters": ("--layout", "fsdp,offload=parameters", "--nproc", "2", *WIDE),
    "offload=all, float16": ("--layout", "fsdp,offload=all", "--nproc", "2", "train.precision=float16", *WIDE),
    "ema": ("train.ema=0.9",),
    "placement on cuda and cpu": ("placed.toml",),
}
SETTINGS = ("task.size=tiny", "train.global_batch=8", "optimizer.lr=0.01")
PLACED = '[layout.placement]\n"layers.0" = "{device}:0"\n"layers.1" = "cpu"\n'


def check_modes(device: torch.device, steps: int) -> Iterator[dict[str, Any]]:
    """A short run under each mode: whether it ended well, near the loss of float32 at its size."""
    plain: dict[bool, tuple[list[float], int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "placed.toml").write_text(PLACED.format(device=device.type))
        for index, (what, arguments) in enumerate(CHECKS.items()):
            if what.startswith("offload") and device.type == "cpu":
                yield row(what, None, None, "needs an accelerator")
                continue
            losses, memory, said = train_mode(Path(folder), f"run-{index}", device, steps, arguments)
            # Of float32, which is the first of its size.
            expected, without = plain.setdefault(WIDE[0] in arguments, (losses, memory))
            yield judge_mode(what, losses, expected) if losses and expected else row(what, False, None, said)
            if what == "offload=activations" and losses:
                yield row(f"{what} takes less memory", memory < without, None, f"{memory:,} of {without:,} bytes")
    yield check_ring(device)
    if device.type == "cuda":
        yield check_flash(device)


def train_mode(
    folder: Path, run: str, device: torch.device, steps: int, arguments: tuple[str, ...]
) -> tuple[list[float], int, str]:
    """`allranks train` in `folder`: (the loss of each step, bytes at its peak, ""), or ([], 0, the last line said)."""
    command = [sys.executable, "-m", "allranks", "train", str(Path(__file__).with_name("language.py").resolve())]
    command += ["--device", device.type, "--run", run, *([] if "--nproc" in arguments else ["--nproc", "1"])]
    command += [*SETTINGS, *arguments, f"train.steps={steps}"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode:
        return [], 0, (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    (end,) = (event for event in Run.open(folder / run).events(0) if event["event"] == "end")
    return read_losses(folder / run / "journal" / "rank-00000.jsonl"), int(end["memory_bytes"] or 0), ""


def check_flash(device: torch.device) -> dict[str, Any]:
    """Whether the transformer's attention runs where flash attention is the only kernel."""
    what = "flash attention takes the model's shapes"
    model = Language(size="tiny").model().to(device)
    tokens = torch.zeros(2, SIZES["tiny"].seq, dtype=torch.int64, device=device)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.autocast("cuda", torch.bfloat16):
            model(tokens).float().sum().backward()
    except RuntimeError as error:
        return row(what, False, None, str(error).splitlines()[0])
    return row(what, True)


def run_tests() -> Iterator[dict[str, Any]]:
    """The tests marked gpu, and the smoke subset (tests/smoke.py), which says whether this torch is one that works."""
    root = Path(__file__).parents[2]
    for what, arguments in {"tests marked gpu": ("-m", "gpu"), "smoke subset": ("-m", "smoke")}.items():
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
    found += [check_modes(device, options.steps)] if "checks" in parts else []
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
