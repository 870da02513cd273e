"""Replicas that send each other less than their gradients, beside one process that plays them all (exceptions.py).

A small model is trained in float64 by the session that `allranks train` makes; plain torch then trains it on the very
samples that each rank fed, as the law of each row says.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import allranks
from allranks.config import resolve_config
from allranks.data.random_keys import seed_all
from allranks.launching.environment import read_environment
from allranks.parallel.backend import choose_device, start, stop
from allranks.stepping.world import gather_processes
from allranks.training.prepare import resolve_layout
from allranks.verifying.parity import RecordedStep, record_run
from allranks.verifying.reference import ReferenceStep
from allranks.verifying.reference_replicas import Reduce, local_loop, low_rank, mean, reduced_loop, rounded

GLOBAL_BATCH, LEARNING_RATE, EVERY, TIMEOUT_SECONDS = 9, 0.05, 5, 120.0
SETTINGS = (
    *("train.precision=float64", f"train.global_batch={GLOBAL_BATCH}", "optimizer.name=sgd"),
    *(f"optimizer.lr={LEARNING_RATE}", "optimizer.momentum=0.9", "optimizer.weight_decay=0"),
)


class Points(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """24 numbers and a class."""

    draws = False

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(24, generator=generator, dtype=torch.float64), "y": torch.tensor(index % 3)}


class Small(allranks.Task):
    """Two layers of 32."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

    def dataset(self, split: str) -> Any:
        return Points() if split == "train" else None

    def loss(self, output: Any, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(output, batch["y"], reduction="sum")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table.

    Attributes:
        overrides: the settings that make it.
        simulate: (each rank's steps) -> what one process computes from their samples.
    """

    what: str
    law: str
    num_ranks: int
    layout: str
    overrides: tuple[str, ...]
    simulate: Callable[[Sequence[Sequence[RecordedStep]]], ReferenceStep]


def make_sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """As SETTINGS say."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def initial_model() -> nn.Module:
    """As every run begins."""
    seed_all(0)
    return Small().model().double()


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The sum over samples."""
    return Small().loss(model(batch["x"]), batch)


def batch_of(samples: Sequence[int]) -> Any:
    """None without samples."""
    return torch.utils.data.default_collate([Points()[index] for index in samples]) if samples else None


def reduced(make: Callable[[], Reduce]) -> Callable[[Sequence[Sequence[RecordedStep]]], ReferenceStep]:
    """The last step of a loop whose gradients are put together by what `make` makes."""

    def simulate(ranks: Sequence[Sequence[RecordedStep]]) -> ReferenceStep:
        steps = [([batch_of(step.samples) for step in steps], GLOBAL_BATCH) for steps in zip(*ranks, strict=True)]
        return reduced_loop(initial_model(), make_sgd, steps, loss_of, make())[-1]

    return simulate


def by_themselves(rate: float, momentum: float) -> Callable[[Sequence[Sequence[RecordedStep]]], ReferenceStep]:
    """The last step of copies that are put together every EVERY steps; the first copy's."""

    def simulate(ranks: Sequence[Sequence[RecordedStep]]) -> ReferenceStep:
        return local_loop(
            initial_model(),
            make_sgd,
            [([batch_of(step.samples) for step in steps], GLOBAL_BATCH) for steps in zip(*ranks, strict=True)],
            loss_of,
            lambda p: torch.optim.SGD(p, lr=rate, momentum=momentum, nesterov=momentum > 0),
            EVERY,
        )[0][-1]

    return simulate


def run(layout: str, overrides: Sequence[str], num_steps: int) -> list[RecordedStep]:
    """In every process: the steps of a real session."""
    environment = read_environment(os.environ)
    given = [*SETTINGS, f"train.steps={num_steps}", *overrides]
    config = resolve_config(task_defaults={}, toml=None, overrides=given, layout=layout)
    choice = choose_device(environment, "cpu", "gloo")
    start(environment, choice, timeout_seconds=TIMEOUT_SECONDS)
    try:
        processes = gather_processes(environment, choice, resolve_layout(config, environment.world_size))
        return record_run(Small(), config, processes, num_steps)
    finally:
        stop()


def measure_replicas(case: Case, num_steps: int) -> tuple[float, float]:
    """(largest difference from the simulation, largest difference from one device), of each tensor's largest."""
    ranks = allranks.launch(run, case.layout, case.overrides, num_steps, nproc=case.num_ranks)
    found = {name: part for name, (_, part) in ranks[0][-1].parameters.items()}
    alone = reduced(lambda: mean)(ranks)
    return _differ(found, case.simulate(ranks).parameters), _differ(found, alone.parameters)


def _differ(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).abs().max() / value.abs().max()) for name, value in expected.items())


LOCAL = f"layout.local_sgd={EVERY}"
POWERSGD = ("layout.ddp_hook=powersgd", "layout.powersgd_rank=2", "layout.powersgd_start=2")
CASES = (
    Case(
        what="bfloat16 hook",
        law="gradients rounded, added and rounded in bfloat16 (2 processes: a sum of one order)",
        num_ranks=2,
        layout="ddp",
        overrides=("layout.ddp_hook=bfloat16",),
        simulate=reduced(lambda: rounded(torch.bfloat16)),
    ),
    Case(
        what="float16 hook",
        law="the same in float16, under a power of two that the sum fits (2 processes)",
        num_ranks=2,
        layout="ddp",
        overrides=("layout.ddp_hook=float16",),
        simulate=reduced(lambda: rounded(torch.float16)),
    ),
    Case(
        what="PowerSGD hook",
        law="rank 2 of the mean gradient and of what was not sent before, from the third step on",
        num_ranks=4,
        layout="ddp",
        overrides=POWERSGD,
        simulate=reduced(lambda: low_rank(2, start=2)),
    ),
    Case(
        what="local SGD",
        law=f"4 copies by themselves, their mean every {EVERY} steps",
        num_ranks=4,
        layout="ddp",
        overrides=(LOCAL, "layout.outer_lr=1.0", "layout.outer_momentum=0.0"),
        simulate=by_themselves(1.0, 0.0),
    ),
    Case(
        what="DiLoCo",
        law=f"4 copies by themselves, SGD with Nesterov momentum over what they have gone every {EVERY} steps",
        num_ranks=4,
        layout="ddp",
        overrides=(LOCAL,),
        simulate=by_themselves(0.7, 0.9),
    ),
)
