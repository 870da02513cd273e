"""Ranks that wait in vain as over NCCL: its watchdog prints what torch 2.13's does, and aborts the process."""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.observing import heartbeat

LIMIT_SECONDS = 120.0


class InVain(allranks.Task):
    """What each rank does in its second step; one word for each attempt, one letter for each rank.

    w: its watchdog ends it, once those of all others that wait have spoken, and who fails has failed. f: it fails.
    s: it stands in code of its own.
    """

    attempts: str = ""

    def dataset(self, split: str) -> TensorDataset | None:
        """Eighty points of two classes; nothing to validate."""
        x = torch.randn(80, 2, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, (x[:, 0] > 0).long()) if split == "train" else None

    def model(self) -> nn.Module:
        """One layer."""
        return nn.Linear(2, 2)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy, in the first step."""
        if heartbeat.current().step == 1:
            rank, attempt = int(os.environ["RANK"]), json.loads(Path("run/run.json").read_text())["attempts"]
            deeds = self.attempts.split("-")[attempt - 1]
            if deeds[rank] == "f":
                raise ValueError("the user's own mistake")
            if deeds[rank] == "w":
                wait_in_vain(rank, attempt, deeds)
            time.sleep(LIMIT_SECONDS)
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def wait_in_vain(rank: int, attempt: int, deeds: str) -> None:
    """Print what the watchdog does, and abort; the collective's number is 40 + the attempt's."""
    at = f"[rank{rank}]:[E606 09:09:08.16 ProcessGroupNCCL.cpp:757] "
    call = f"WorkNCCL(SeqNum={40 + attempt}, OpType=ALLREDUCE, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000)"
    group, work = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}] ", f"at work sequence id: {40 + attempt}"
    said = f"{at}[Rank {rank}] Watchdog caught collective operation timeout: {call} ran for 600004 milliseconds\n"
    os.write(2, f"{said}{at}{group} failure detected by watchdog {work} PG status: last enqueued work\n".encode())
    Path(f"said-{attempt}-{rank}").touch()
    awaited = [Path(f"said-{attempt}-{one}") for one, deed in enumerate(deeds) if deed == "w"]
    awaited += [Path(f"run/logs/failure-{one:05d}.json") for one, deed in enumerate(deeds) if deed == "f"]
    until = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < until and not all(path.exists() for path in awaited):
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()
