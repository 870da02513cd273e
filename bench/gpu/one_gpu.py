"""What one GPU has to show: a 1B-parameter transformer beside a raw compiled loop, and the modes that need CUDA.

Speed: sequences of 4,096 tokens, bfloat16, blocks compiled, in a process of its own each time, raw and ours by turns;
the first steps, which compile, are not counted. Mfu takes 6 * parameters + 12 * layers * width * sequence operations a
token (PaLM, arXiv 2204.02311, appendix B) over the device's dense bfloat16 peak. Checks: short runs of the real command
under each mode, held to the loss of the same run in float32; then the tests marked gpu, and the smoke subset.

    python bench/gpu/one_gpu.py [--rounds 2] [--steps 20] [--only speed,checks,tests] [--json FILE]
    python bench/gpu/one_gpu.py --device cpu --tiny      that the program itself works
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import allranks
from allranks.config import resolve_config
from allranks.data.micro_step import StepBatch
from allranks.launching.environment import ALONE
from allranks.models.transformer import Transformer
from allranks.observing.counters import Stopwatch
from allranks.observing.journal import Journal
from allranks.observing.recorder import Recorder
from allranks.parallel.backend import DeviceChoice
from allranks.stepping.passes import Passes, Scale, StepSums
from allranks.stepping.session import assemble
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.training.trainer import Trainer

PEAK_TFLOPS: Mapping[str, float] = {"H200": 989.0, "H100": 989.0, "A100": 312.0}
"""Dense bfloat16, without sparsity, of the SXM parts: NVIDIA's data sheets."""

WARM_STEPS = 5


@dataclass(frozen=True)
class Size:
    """What is trained: a transformer, and samples a step."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocabulary: int
    seq: int
    batch: int


SIZES = {"1b": Size(18, 2048, 16, 5632, 32_000, 4096, 4), "tiny": Size(2, 32, 2, 48, 64, 32, 2)}


class Tokens(torch.utils.data.Dataset[Any]):
    """Random tokens: {"x": [seq], "y": [seq]}."""

    draws = False

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(size.vocabulary, (64, size.seq + 1), generator=generator)

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index % len(self.rows)]
        return {"x": row[:-1], "y": row[1:]}


class Language(allranks.Task):
    """The next token."""

    size: str = "1b"
    defaults: ClassVar[dict[str, object]] = {"optimizer.lr": 3e-4, "train.max_norm": 1.0, "evaluate.every": 0}

    def model(self) -> nn.Module:
        """The transformer of the repository."""
        s = SIZES[self.size]
        return Transformer(s.vocabulary, s.layers, s.width, s.heads, ffn=s.ffn, max_seq=s.seq)

    def dataset(self, split: str) -> Any:
        """Tokens to train on."""
        return Tokens(SIZES[self.size]) if split == "train" else None

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Nats, summed."""
        return functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), reduction="sum")


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


class _NoSaver:
    saved_step = -1

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, step: int) -> Path:
        """Nothing is written."""
        return Path()


def train_raw(task: Language, size: Size, device: torch.device, steps: int, clock: Callable[[], None]) -> None:
    """The loop that one would write by hand; `clock` is called when the counted steps begin."""
    torch.manual_seed(0)
    model = task.model().to(device)
    for block in model.get_submodule("layers").children():
        block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loader = iter(torch.utils.data.DataLoader(Tokens(size), batch_size=size.batch, pin_memory=device.type == "cuda"))
    for step in range(steps):
        if step == WARM_STEPS:
            clock()
        batch = {name: part.to(device, non_blocking=True) for name, part in next(loader).items()}
        with torch.autocast(device.type, torch.bfloat16):
            output = model(batch["x"])
        loss = task.loss(output.float(), batch) / batch["y"].numel()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_ours(task: Language, size: Size, device: torch.device, steps: int, clock: Clock, folder: Path) -> None:
    """The Trainer as the command runs it, with journal and TensorBoard."""
    overrides = [f"train.steps={steps}", f"train.global_batch={size.batch}", "train.precision=bfloat16"]
    config = resolve_config(
        task_defaults=task.defaults, toml=None, overrides=[*overrides, f"task.size={task.size}"], layout="compile=block"
    )
    processes = gather_processes(ALONE, DeviceChoice(device, "gloo", None, ()), resolve_layout(config, 1))
    stopwatch, journal = Stopwatch(), Journal(folder / "journal.jsonl", 0)
    recorder = Recorder(journal, tensorboard=folder / "tensorboard", inline=device.type == "cpu")
    session = assemble(task, config, processes, stopwatch, lambda: (False, False), observe=clock.around)
    Trainer(session, _NoSaver(), stopwatch, recorder, None).train()
    clock.end()
    recorder.close()  # once a run: no part of a step


def measure(kind: str, name: str, device: torch.device, steps: int) -> dict[str, float]:
    """One process: seconds a step, and the peak of what torch has allocated."""
    size, task, total = SIZES[name], Language(size=name), steps + WARM_STEPS
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = Clock(synchronise)
    with tempfile.TemporaryDirectory() as folder:
        if kind == "raw":
            train_raw(task, size, device, total, clock.begin)
            clock.end()
        else:
            train_ours(task, size, device, total, clock, Path(folder))
    seconds = (clock.ended - clock.began) / steps
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    parameters = sum(p.numel() for p in task.model().parameters())
    return {"seconds": seconds, "peak_bytes": float(peak), "parameters": float(parameters)}


def compare_speed(name: str, device: torch.device, rounds: int, steps: int) -> dict[str, Any]:
    """Raw and ours by turns, each in a process of its own; medians."""
    found: dict[str, list[dict[str, float]]] = {"raw": [], "ours": []}
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
        "device": device_name,
        "torch": torch.__version__,
        "parameters": int(parameters),
        "seconds": seconds,
        "speed_of_raw": seconds["raw"] / seconds["ours"],
        "memory_of_raw": peak["ours"] / peak["raw"] if peak["raw"] else None,
        "tflops": tflops,
        "mfu": None if top is None else tflops / top,
        "peak_bytes": peak,
    }


CHECKS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("train.precision=bfloat16",),
    "float16": ("train.precision=float16",),
    "float8": ("train.precision=float8", "layout.compile=block"),
    "compile=block": ("train.precision=bfloat16", "layout.compile=block"),
    "recompute=full": ("layout.recompute=full",),
    "offload=activations": ("layout.offload=activations",),
    # Two processes on the one GPU, which speak through gloo: shards need a second one.
    "offload=parameters": ("--layout", "fsdp,offload=parameters", "--nproc", "2"),
    "offload=all, float16": ("--layout", "fsdp,offload=all", "--nproc", "2", "train.precision=float16"),
    "ema": ("train.ema=0.9",),
    "placement on cuda and cpu": ("placed.toml",),
}
TOLERANCE = 0.05  # of the last loss: what rounding in eight bits may move it within these steps
PLACED = '[layout.placement]\n"layers.0" = "{device}:0"\n"layers.1" = "cpu"\n'


def check_modes(device: torch.device, steps: int) -> Iterator[dict[str, Any]]:
    """A short run under each mode: whether it ended well, near the loss of float32."""
    expected = None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "placed.toml").write_text(PLACED.format(device=device.type))
        for index, (what, arguments) in enumerate(CHECKS.items()):
            fixed = ("--device", device.type, "--run", f"run-{index}")
            command = [sys.executable, "-m", "allranks", "train", f"{Path(__file__).resolve()}:Language", *fixed]
            command += [*([] if "--nproc" in arguments else ["--nproc", "1"]), *arguments]
            settings = ("task.size=tiny", f"train.steps={steps}", "train.global_batch=8", "optimizer.lr=0.01")
            ran = subprocess.run([*command, *settings], cwd=folder, capture_output=True, text=True, check=False)
            loss = None
            if ran.returncode == 0:
                lines = (Path(folder) / f"run-{index}" / "journal" / "rank-00000.jsonl").read_text().splitlines()
                loss = [line["loss"] for line in map(json.loads, lines) if line["event"] == "step"][-1]
                expected = loss if expected is None else expected
            near = loss is not None and expected is not None and abs(loss - expected) <= TOLERANCE * expected
            last = "" if near else (ran.stderr.strip().splitlines() or [""])[-1]
            yield {"what": what, "ok": near, "loss": loss, "said": last}
    if device.type == "cuda":
        yield {"what": "flash attention takes the model's shapes", **check_flash(device)}


def check_flash(device: torch.device) -> dict[str, Any]:
    """Whether the transformer's attention runs where flash attention is the only kernel."""
    model = Language(size="tiny").model().to(device)
    tokens = torch.zeros(2, SIZES["tiny"].seq, dtype=torch.int64, device=device)
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), torch.autocast("cuda", torch.bfloat16):
            model(tokens).float().sum().backward()
    except RuntimeError as error:
        return {"ok": False, "loss": None, "said": str(error).splitlines()[0]}
    return {"ok": True, "loss": None, "said": ""}


def run_tests() -> Iterator[dict[str, Any]]:
    """The tests marked gpu, and the smoke subset (tests/smoke.py), which says whether this torch is one that works."""
    root = Path(__file__).parents[2]
    for what, arguments in {"tests marked gpu": ("-m", "gpu"), "smoke subset": ("-m", "smoke")}.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        lines = ran.stdout.strip().splitlines() or [""]
        yield {"what": what, "ok": ran.returncode == 0, "loss": None, "said": lines[-1]}


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
    found = [check_modes(device, options.steps)] if "checks" in parts else []
    found += [run_tests()] if "tests" in parts else []
    for row in (row for some in found for row in some):
        rows.append(row)
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        print(f"{'ok' if row['ok'] else 'NO':3} {row['what']:42} {loss:8} {row['said']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
