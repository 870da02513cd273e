"""Whether checkpoints written while a training goes on hold it on this device: read back, verified, gone on from."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from verdicts import judge_mode, row

from allranks.run import Run

WHAT = "saved while it trains, and resumed"
TASK = str(Path(__file__).with_name("language.py").resolve())
SETTINGS = ("task.size=wide", "train.global_batch=8", "optimizer.lr=0.003", "train.precision=bfloat16")


def check_saves(device: torch.device, steps: int) -> dict[str, Any]:
    """A run that is saved every second step, verified and resumed, beside one that was never interrupted."""
    with tempfile.TemporaryDirectory() as name:
        folder, every = Path(name), ("checkpoint.every=2", "checkpoint.asynchronous=true")
        start = ("--device", device.type, "--nproc", "1", *SETTINGS, *every)
        errands = (
            ("train", TASK, "--run", "whole", *start, f"train.steps={steps}"),
            ("train", TASK, "--run", "parted", *start, f"train.steps={steps // 2}"),
            ("checkpoint", "verify", "parted"),
            ("train", "--resume", "parted", "--change", "train.steps", f"train.steps={steps}"),
            ("checkpoint", "verify", "parted"),
        )
        for words in errands:
            command = [sys.executable, "-m", "allranks", *words]
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if ran.returncode:
                said = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
                return row(WHAT, False, None, f"{words[0]} {words[1]}: {said}")
        return judge_mode(WHAT, _losses(folder / "parted"), _losses(folder / "whole"))


def _losses(run: Path) -> list[float]:
    """The loss of each step, of all attempts."""
    return [event["loss"] for event in Run.open(run).events(0) if event["event"] == "step"]
