"""A user's Task file that meets a fault in its first attempt: rank 1, in a forward, a sample or a checkpoint."""

import contextlib
import mmap
import os
import re
import signal
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, get_worker_info

import allranks
from allranks.observing import heartbeat
from allranks.surviving.kernel import ENDED, process_state
from allranks.surviving.monitor import LEAST_SAVE_SECONDS


def first_attempt() -> bool:
    """Whether the workers were not started again yet."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Numbers(Dataset[Any]):
    """Numbers; rank 1 waits for its 60th where the fault is `data`, and where it is `loader` its loader dies of it."""

    draws = False

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.loads = 0

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Any:
        self.loads += 1
        if self.loads == 60 and os.environ.get("RANK") == "1" and first_attempt():
            if self.fault == "data":
                time.sleep(600)
            if self.fault == "loader" and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((2,), float(index % 7)), index % 2


class Faulty(allranks.Task):
    """Learn little, and meet a fault."""

    fault: str = "none"
    width: int = 8
    pause: float = 0.01
    at: int = 15

    def dataset(self, split: str) -> Any:
        """Nothing to validate."""
        return Numbers(self.fault) if split == "train" else None

    def model(self) -> nn.Module:
        """Two layers; between their backwards is a place for a fault."""
        between = nn.Tanh()
        if self.fault == "backward":
            between.register_full_backward_pre_hook(lambda *_: self._meet_at_15("SIGKILL"))
        return nn.Sequential(nn.Linear(2, self.width), between, nn.Linear(self.width, 2))

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy."""
        self._calls = getattr(self, "_calls", 0) + 1
        time.sleep(self.pause if first_attempt() else 0.01)
        if self.fault == "slow" and os.environ.get("RANK") == "1":
            time.sleep(0.1)
        self._meet_at_15(self.fault)
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")

    def state_dict(self) -> dict[str, Any]:
        """A part of each checkpoint; rank 1 does not come to the end of its second one where the fault is `disk`."""
        self._saves = getattr(self, "_saves", 0) + 1
        if self.fault == "disk" and self._saves == 2 and os.environ.get("RANK") == "1" and first_attempt():
            time.sleep(600)
        if self.fault == "slow disk" and self._saves == 2 and os.environ.get("RANK") == "1":
            time.sleep(LEAST_SAVE_SECONDS + 4)
        return {}

    def _meet_at_15(self, fault: str) -> None:
        here = self.at if first_attempt() else 5  # later ones begin at step 10
        if self._calls == here and os.environ.get("RANK") == "1" and (first_attempt() or fault == "memory again"):
            meet(fault)


def slowly(graph: Any, inputs: object) -> Any:
    """A compiler that takes longer than any step."""
    time.sleep(8)
    return graph.forward


def leave_connections_open() -> None:
    """End as one whose work is done, while a process that was forked off has the connections: nobody sees them close.

    So do processes of a data loader. It ends with the command, and has none of the pipes by which a process is seen.
    """
    command = os.getppid()
    if os.fork() == 0:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one by which the folder was read
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.close(int(name))
        while process_state(command) not in ("", ENDED):
            time.sleep(0.1)
        os._exit(0)
    heartbeat.current().finish(0)
    os._exit(0)


def meet(fault: str) -> None:
    """What a fault is made of."""
    match fault:
        case "straggler":
            time.sleep(600)
        case "lock":
            re.match(r"(a?){40}a{40}", "a" * 40)
        case "compilation":
            torch.compile(torch.sin, backend=slowly)(torch.ones(2))
        case "memory" | "memory again":
            torch.ones(8 << 30, dtype=torch.uint8)
        case "dead":
            leave_connections_open()
        case "divergence":
            dist.broadcast(torch.ones(42), src=0)
        case "clock":  # of everybody, as a time service sets it; then all have to start again under the other time
            Path(os.environ["CLOCK_IS_SET"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "mapped":
            with tempfile.TemporaryFile() as file:
                file.truncate(1 << 16)
                mapped = mmap.mmap(file.fileno(), 1 << 16)
                file.truncate(0)
                print(mapped[5000])
        case "SIGSTOP" | "SIGKILL" | "SIGABRT":
            os.kill(os.getpid(), signal.Signals[fault])
