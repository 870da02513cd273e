"""Records of one device and of ranks, by hand: two steps of a model with two parameters, samples 0 to 7."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import torch

from allranks.verifying.evidence import Evidence
from allranks.verifying.recording import Draw, OneDevice, Part, Parts, RunRecord, Start, StepRecord
from allranks.verifying.world_view import WorldView, view_of

NAMES = ("weight", "bias")
VALUES = {
    "weight": torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2),
    "bias": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64),
}


def parts(factor: float = 1.0) -> Parts:
    return {name: Part(None, VALUES[name] * factor) for name in NAMES}


def step_of(index: int, rows: Sequence[int]) -> StepRecord:
    return StepRecord(
        loss=2.0 - index,
        rows=list(rows),
        batch_sizes=(len(rows),),
        raw=parts(0.25 + index),
        gradients=parts(0.125 + index),
        norm=3.0,
        settings=[{"lr": 0.1, "weight_decay": 0.01}],
        updates=1,
        parameters=parts(1.5 + index),
        buffers={"mean": Part(None, torch.tensor([1.0 + index, 2.0], dtype=torch.float64))},
        state={"momentum.weight": Part(None, VALUES["weight"] * index)},
        seeds=(index, index, index),
        drew=(False, False, False),
    )


def run_of(rows: Sequence[Sequence[int]]) -> RunRecord:
    start = Start(parameters=parts(), buffers={}, optimizers=["SGD"])
    return RunRecord(
        start=start,
        steps=[step_of(index, some) for index, some in enumerate(rows)],
        evaluation={"accuracy": 0.75},
        evaluated=[100, 101, 102, 103],
    )


def one_device() -> RunRecord:
    run = run_of([[0, 1, 2, 3], [4, 5, 6, 7]])
    for step in run.steps:
        step.draws = [Draw(2000 + len(step.rows), (4, 4), False, probability=0.5)]
    return run


def two_ranks() -> list[RunRecord]:
    ranks = [run_of([[0, 1], [4, 5]]), run_of([[2, 3], [6, 7]])]
    for rank, run in enumerate(ranks):
        run.evaluated = [100 + rank, 102 + rank]
        for step in run.steps:
            step.draws = [Draw(1000 * rank + len(step.rows), (2, 4), False, probability=0.5)]
    return ranks


def evidence(
    change: Callable[[list[RunRecord]], object] = lambda ranks: None,
    alone: Callable[[RunRecord], object] = lambda run: None,
    world: WorldView | None = None,
    shares: Callable[[int], object] = lambda step: (),
) -> Evidence:
    """Two data ranks that compute what one device computes, after `change` (and `alone` on one device)."""
    one, ranks = one_device(), two_ranks()
    alone(one)
    change(ranks)
    variants = [deepcopy(one)]
    return Evidence(OneDevice(one, variants), ranks, world or view_of(ranks), shares=shares)  # type: ignore[arg-type]


def scale(some: Parts, factor: float, names: Sequence[str] = NAMES) -> None:
    for name in names:
        some[name] = Part(some[name].box, some[name].value * factor)
