"""Short runs of the real command under the modes that need a GPU, each held to the loss of the same run in float32."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from language import SIZES, Language
from ring_kernels import check_ring
from saves import check_saves
from torch.nn.attention import SDPBackend, sdpa_kernel
from verdicts import judge_mode, row

from allranks.run import Run

WIDE = ("task.size=wide", "optimizer.lr=0.003")
MOE = ("task.experts=4",)
ODD = ("task.size=odd",)
CHECKS: Mapping[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("train.precision=bfloat16",),
    "float16": ("train.precision=float16",),
    "float8": ("train.precision=float8", "layout.compile=block"),
    # 16 divides no micro-batch's rows, which eight-bit kernels ask for.
    "float32, 7 tokens": (*ODD,),
    "float8, 7 tokens": ("train.precision=float8", *ODD),
    "compile=block": ("train.precision=bfloat16", "layout.compile=block"),
    "recompute=full": ("layout.recompute=full",),
    "float32, wide": (*WIDE,),
    "offload=activations": ("layout.offload=activations", *WIDE),
    # Two processes on the one GPU, which speak through gloo: what is cut needs a second one.
    "offload=parameters": ("--layout", "fsdp,offload=parameters", "--nproc", "2", *WIDE),
    "offload=all, float16": ("--layout", "fsdp,offload=all", "--nproc", "2", "train.precision=float16", *WIDE),
    "cp=2": ("--layout", "cp=2", "--nproc", "2"),
    "cp=2, ring": ("--layout", "cp=2", "--nproc", "2", "layout.context=ring"),
    "cp=2, ring, bfloat16": ("--layout", "cp=2", "--nproc", "2", "layout.context=ring", "train.precision=bfloat16"),
    "tp=2": ("--layout", "tp=2", "--nproc", "2"),
    "pp=2": ("--layout", "pp=2", "--nproc", "2", "train.micro_steps=4"),
    "float32, experts": (*MOE,),
    "ep=2": ("--layout", "dp_replicate=2,ep=2", "--nproc", "2", *MOE),
    "ema": ("train.ema=0.9",),
    "placement on cuda and cpu": ("placed.toml",),
}
SETTINGS = ("task.size=tiny", "train.global_batch=8", "optimizer.lr=0.01")
PLACED = '[layout.placement]\n"layers.0" = "{device}:0"\n"layers.1" = "cpu"\n'


def check_modes(device: torch.device, steps: int, jobs: int) -> Iterator[dict[str, Any]]:
    """A short run under each mode, `jobs` at a time: whether it ended well, near the loss of float32 of its model."""
    cases = {what: words for what, words in CHECKS.items() if device.type != "cpu" or not what.startswith("offload")}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        (Path(folder) / "placed.toml").write_text(PLACED.format(device=device.type))
        runs = {
            what: pool.submit(train_mode, Path(folder), f"run-{index}", device, steps, words)
            for index, (what, words) in enumerate(cases.items())
        }
        plain: dict[tuple[str, ...], tuple[list[float], int]] = {}
        for what, arguments in CHECKS.items():
            if what not in runs:
                yield row(what, None, None, "needs an accelerator")
                continue
            losses, memory, said = runs[what].result()
            # Of float32, which is the first of its model.
            model = tuple(word for word in arguments if word.startswith("task."))
            expected, without = plain.setdefault(model, (losses, memory))
            yield judge_mode(what, losses, expected) if losses and expected else row(what, False, None, said)
            if what == "offload=activations" and losses:
                yield row(f"{what} takes less memory", memory < without, None, f"{memory:,} of {without:,} bytes")
    yield check_saves(device, steps)
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


def read_losses(journal: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in map(json.loads, journal.read_text().splitlines()) if line["event"] == "step"]


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
