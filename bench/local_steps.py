"""What plan_local.py measures in its processes: steps of every layout, by turns."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import allranks
from allranks.benchmarking.small_programs import session_steps
from allranks.benchmarking.subject import Subject
from allranks.config import Config, resolve_config
from allranks.errors import AllranksError
from allranks.launching.environment import read_environment
from allranks.layout import Layout
from allranks.parallel.backend import DeviceChoice, choose_device, start, stop
from allranks.process_environment import ProcessEnvironment

TIMEOUT_SECONDS = 240.0
WARM_STEPS = 2
"""Steps of each layout before any is timed: optimizer state is made in the first, DDP builds its buckets after it."""
SPARE_STEPS = 2
PRECISION = "float32"
WIDTH, HIDDEN, DEPTH, CLASSES = 512, 1536, 6, 64


@dataclass(frozen=True, slots=True)
class Case:
    """One layout of one model.

    Attributes:
        model: a key of TASKS.
        layout: as a string.
        context: what such a string does not hold (`layout.context`).
        global_batch: the same for all layouts of a model, so that their steps can be compared.
        micro_batch: samples of a forward on one data-parallel rank.
    """

    model: str
    layout: str
    global_batch: int
    micro_batch: int
    context: str = "ulysses"

    def resolve(self, nproc: int) -> Layout:
        """On `nproc` processes."""
        return Layout.resolve(config_of(self, 1).layout, nproc)


class Vectors(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """`length` samples of 32 fixed random vectors, and classes."""

    draws = False

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(32, WIDTH, generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index % 32], torch.tensor(index % CLASSES)


class Wide(nn.Module):
    """x + a layer of HIDDEN features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return found


class Perceptron(allranks.Task):
    """Many weights, few rows: the step is communication and update as much as computation."""

    samples: int = 4096

    def model(self) -> nn.Module:
        return nn.Sequential(*(Wide() for _ in range(DEPTH)), nn.Linear(WIDTH, CLASSES))

    def hints(self) -> allranks.Hints:
        return allranks.Hints(tensor={"*.up": "colwise", "*.down": "rowwise"})

    def dataset(self, split: str) -> Any:
        return Vectors(self.samples) if split == "train" else None

    def loss(self, output: Any, batch: Any) -> Tensor:
        return functional.cross_entropy(output, batch[1], reduction="sum")


def task_of(model: str, samples: int = 4096) -> allranks.Task:
    """The Task of that name."""
    return Subject(size="10m", samples=samples) if model == "transformer" else Perceptron(samples=samples)


def config_of(case: Case, steps: int) -> Config:
    """`steps` steps of a case."""
    overrides = [f"train.steps={steps}", f"train.global_batch={case.global_batch}", "evaluate.every=0"]
    overrides += [f"train.micro_batch={case.micro_batch}", "optimizer.lr=0.0001", "train.max_norm=1.0"]
    overrides += [f"layout.context={case.context}", f"train.precision={PRECISION}"]
    return resolve_config(task_defaults={}, toml=None, overrides=overrides, layout=case.layout)


def run(cases: Sequence[Case], turns: int) -> tuple[list[list[float]], list[list[float]], dict[int, str]]:
    """In every process: (seconds of each turn of each case, the processor's seconds of them, and by place in `cases`
    why one was refused)."""
    environment = read_environment(os.environ)
    choice = choose_device(environment, "cpu", "gloo")
    start(environment, choice, timeout_seconds=TIMEOUT_SECONDS)
    try:
        return _take_turns(cases, turns, environment, choice)
    finally:
        stop()


def _take_turns(
    cases: Sequence[Case], turns: int, environment: ProcessEnvironment, choice: DeviceChoice
) -> tuple[list[list[float]], list[list[float]], dict[int, str]]:
    """Every case a step in each turn, forth in one turn and back in the next, so that a busy while meets all alike."""
    steps = [_steps(case, WARM_STEPS + turns + SPARE_STEPS, environment, choice) for case in cases]
    refused: dict[int, str] = {}
    for index, side in enumerate(steps):
        try:
            for _ in range(WARM_STEPS):
                next(side)()
        except AllranksError as error:  # all processes alike, before any talks to another
            refused[index] = str(error)
    seconds: list[list[float]] = [[] for _ in cases]
    busy: list[list[float]] = [[] for _ in cases]
    for turn in range(turns):
        for index in (i for i in range(len(cases))[:: -1 if turn % 2 else 1] if i not in refused):
            dist.barrier()
            began, spent = time.perf_counter(), time.process_time()
            next(steps[index])()
            seconds[index].append(time.perf_counter() - began)
            busy[index].append(time.process_time() - spent)
    return seconds, busy, refused


def _steps(
    case: Case, steps: int, environment: ProcessEnvironment, choice: DeviceChoice
) -> Iterator[Callable[[], float]]:
    task = task_of(case.model, samples=steps * case.global_batch)
    return session_steps(task, config_of(case, steps), case.resolve(environment.world_size), environment, choice)
