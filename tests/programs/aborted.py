"""Steps that fail as on a GPU over NCCL: its watchdog aborts the process while the error is still on its way out."""

import os
import resource
import threading
import time
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.data import TensorDataset

import allranks
from allranks.data.loader import Loader
from allranks.observing import heartbeat


def fail_on_the_device() -> NoReturn:
    """Raise what the user's code meets, in a process whose loader takes a second to close; the watchdog, 0.1 s."""
    close = Loader.close

    def close_slowly(self: Loader) -> None:
        time.sleep(1.0)
        close(self)

    Loader.close = close_slowly  # type: ignore[method-assign]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    timer = threading.Timer(0.1, os.abort)
    timer.daemon = True
    timer.start()
    raise RuntimeError("CUDA error: device-side assert triggered")


def points() -> TensorDataset:
    """A hundred of them, of two classes."""
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x[:, 0] > 0).long())


class Aborted(allranks.Task):
    """Rank 1 fails in the forward of its third step."""

    def dataset(self, split: str) -> TensorDataset | None:
        """Nothing to validate."""
        return points() if split == "train" else None

    def model(self) -> nn.Module:
        """One layer."""
        return nn.Linear(2, 2)

    def loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        """Summed cross-entropy."""
        if os.environ.get("RANK") == "1" and heartbeat.current().step == 2:
            fail_on_the_device()
        return nn.functional.cross_entropy(output, batch[1], reduction="sum")


def own_loop() -> None:
    """The same in a loop of one's own."""
    with allranks.join() as world:
        model = world.parallelize(nn.Linear(2, 2))
        optimizer = world.optimizer(model, torch.optim.SGD, lr=0.1)
        stream = world.stream(points(), global_batch=10)
        for x, labels in stream:
            if world.rank == 1 and stream.step == 2:
                fail_on_the_device()
            world.backward(nn.functional.cross_entropy(model(x), labels, reduction="sum"), len(labels))
            world.step(optimizer)


if __name__ == "__main__":
    allranks.launch(own_loop, nproc=2)
