"""Time and memory of two loops in the same processes, by turns."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from allranks.benchmarking.memory_watch import MemoryWatch

Steps = Iterator[Callable[[], float]]

WARM_STEPS = 3
"""Steps before anything is measured: optimizer state is made in the first, DDP builds its buckets anew after it."""

STEPS_A_TURN = 2
WARM_TURNS = 1
"""Turns at the start that are not counted."""


@dataclass(frozen=True)
class Side:
    """One of the two loops, warm.

    Attributes:
        steps: the steps to come.
        first_loss: of its first step.
        peak_bytes: the most that it held at once during one step, all since its making included; 0: cannot be told.
    """

    steps: Steps
    first_loss: float
    peak_bytes: int


def warm_up(make: Callable[[], Steps], device: torch.device) -> Side:
    """Make a loop, run it warm, and watch the memory of one step."""
    watch = MemoryWatch(device)
    steps = make()
    losses = [next(steps)() for _ in range(WARM_STEPS)]
    with watch:
        next(steps)()
    return Side(steps, losses[0], watch.peak_bytes())


def take_turns(
    first: Steps, second: Steps, turns: int, *, barrier: Callable[[], None], finish: Callable[[], None]
) -> list[tuple[float, float]]:
    """Seconds a step of the first and of the second, a pair a turn; who begins changes with every turn.

    Args:
        barrier: waits for the other processes, before the clock starts.
        finish: waits for what a side has left undone, before the clock stops.
    """
    pairs = []
    for turn in range(WARM_TURNS + turns):
        spent = [0.0, 0.0]
        for place, side in ((0, first), (1, second))[:: -1 if turn % 2 else 1]:
            barrier()
            began = time.perf_counter()
            for _ in range(STEPS_A_TURN):
                loss = next(side)
            loss()
            finish()
            spent[place] = (time.perf_counter() - began) / STEPS_A_TURN
        pairs.append((spent[0], spent[1]))
    return pairs[WARM_TURNS:]


def num_steps(turns: int, rounds: int = 1) -> int:
    """Steps that each side makes in so many measurements of `turns` turns, and one to spare."""
    return WARM_STEPS + 1 + rounds * (WARM_TURNS + turns) * STEPS_A_TURN + 1
