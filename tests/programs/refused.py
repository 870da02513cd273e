"""A user's Task file whose saves the system refuses: strace makes calls of its own process fail, as a disk would."""

import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import allranks

ANYBODY = (0x59616D61, ctypes.c_ulong(-1))  # prctl: PR_SET_PTRACER, PR_SET_PTRACER_ANY


class Numbers(Dataset[Any]):
    """Numbers."""

    draws = False

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index % 7)), index % 2


class Refused(allranks.Task):
    """Learn little.

    Attributes:
        faults: of one save after the other from the second on, `RANK:CALL+CALL:ERROR` or `RANK:CALL:ERROR:WHICH`,
            with commas between them: which of that rank's calls the system refuses, in strace's words; WHICH: of those
            of a save the n-th alone.
    """

    faults: str = ""

    def dataset(self, split: str) -> Any:
        """Nothing to validate."""
        return Numbers() if split == "train" else None

    def model(self) -> nn.Module:
        """One layer."""
        return nn.Linear(2, 2)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy."""
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def state_dict(self) -> dict[str, Any]:
        """A part of each checkpoint, asked for before anything of it is written: refuse the rest of this save."""
        self._saves = getattr(self, "_saves", 0) + 1
        tracer: subprocess.Popen[bytes] | None = getattr(self, "_tracer", None)
        if tracer is not None:
            tracer.terminate()
            tracer.wait()
            self._tracer = None
        faults = self.faults.split(",")
        if 3 <= self._saves < 3 + len(faults):  # the first is no save
            rank, calls, error, *which = faults[self._saves - 3].split(":")
            if rank == os.environ["RANK"]:
                self._tracer = refuse(calls.replace("+", ","), error, which)
        return {}


def refuse(calls: str, error: str, which: list[str]) -> "subprocess.Popen[bytes]":
    """From now on system calls of this process fail, in all of its threads."""
    ctypes.CDLL(None).prctl(*ANYBODY, 0, 0, 0)
    inject = f"inject={calls}:error={error}" + "".join(f":when={number}" for number in which)
    command = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={calls}", "-e", inject, "-p", str(os.getpid())]
    tracer = subprocess.Popen(command)
    while not all("TracerPid:\t0\n" not in task.read_text() for task in Path("/proc/self/task").glob("*/status")):
        assert tracer.poll() is None, "strace cannot trace this process"
        time.sleep(0.01)
    return tracer
