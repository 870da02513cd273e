import numpy as np

from allranks.data.micro_step import MicroStep, StepBatch


def micro_step(targets: int | None, samples: int) -> MicroStep:
    """A micro-step with so many samples; a filler with 0."""
    positions = np.arange(samples)
    return MicroStep("batch", 1 if samples else 0, targets, 7, positions, positions)


def test_targets_and_local_size_are_sums_over_the_micro_steps() -> None:
    batch = StepBatch(0, 0, 12, (micro_step(5, 3), micro_step(4, 2), micro_step(0, 0)))
    assert (batch.targets, batch.local_size) == (9, 5)


def test_targets_that_nobody_counts_are_none() -> None:
    assert StepBatch(0, 0, 12, (micro_step(5, 3), micro_step(None, 2))).targets is None
