"""Step batches made by hand."""

from typing import Any

import numpy

from allranks.data.micro_step import MicroStep, StepBatch
from allranks.task import Task


def micro_step_of(task: Task, samples: list[int], first: int = 0, *, weight: int = 1, key: int = 1) -> MicroStep:
    """`samples` of the training split at positions from `first` on; with weight 0 they are a filler's."""
    dataset: Any = task.dataset("train")
    counted = samples if weight else []
    return MicroStep(
        batch=task.collate([dataset[sample] for sample in samples]),
        weight=weight,
        targets=None,
        random_key=key,
        positions=numpy.arange(first, first + len(counted), dtype=numpy.int64),
        samples=numpy.array(counted, dtype=numpy.int64),
    )


def batch_of(*micro_steps: MicroStep) -> StepBatch:
    """The step of these, from position 0 on."""
    return StepBatch(0, 0, sum(len(m.positions) for m in micro_steps), micro_steps)
