"""The values that data hands to the step: what to load (plans) and what was loaded (batches).

A filler is a micro-step in which this rank has no sample: it repeats one, so that every rank runs the same number of
forwards, and counts for nothing: weight 0, no targets, no positions.
"""

from dataclasses import dataclass
from typing import Any

from allranks.data.permutation import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class MicroPlan:
    """One forward of one rank, before its samples are loaded.

    Attributes:
        first: global position of the first sample to load; the others follow it.
        indices: dataset indices to load; at least one, also for a filler.
        weight: 1, or 0 for a filler.
        random_key: seeds the generators for the forward (law 6).
        positions: int64 global positions that count; empty for a filler.
        samples: int64 sample numbers at these positions.
    """

    first: int
    indices: list[int]
    weight: int
    random_key: int
    positions: IntArray
    samples: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One optimizer step of one rank: `size` samples over the whole world from global `position` on, in `micro_plans`.

    `exhausted` is only ever true for a dataset that shards itself: this rank's part has ended in or before this step.
    `left_out` positions before it were never fed.
    """

    step: int
    position: int
    size: int
    micro_plans: tuple[MicroPlan, ...]
    exhausted: bool = False
    left_out: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class MicroStep:
    """One forward of one rank: the collated batch and everything the step needs to know about it.

    Attributes:
        batch: what `collate` returned.
        weight: 1, or 0 for a filler, whose loss is multiplied by it.
        targets: number of targets in the batch; 0 for a filler, None where nobody counts them.
        random_key: seeds the generators for the forward (law 6).
        positions: int64 global positions fed; empty for a filler.
        samples: int64 sample numbers at these positions.
    """

    batch: Any
    weight: int
    targets: int | None
    random_key: int
    positions: IntArray
    samples: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The M micro-steps of one optimizer step on one rank; M is the same on every rank.

    Attributes:
        step: number of the step, from 0, counted in steps of this global batch.
        position: global position of the step's first sample.
        size: samples of the step over the whole world.
        exhausted: this rank's shard has ended (order="sharded" only): the run ends at the step whose local_size is 0 on
            every rank.
        left_out: positions before it that were never fed.
    """

    step: int
    position: int
    size: int
    micro_steps: tuple[MicroStep, ...]
    exhausted: bool = False
    left_out: int = 0

    @property
    def seen(self) -> int:
        """Samples fed before it, over the whole world."""
        return self.position - self.left_out

    @property
    def targets(self) -> int | None:
        """Targets of this rank's part, or None where nobody counts them."""
        total = 0
        for micro_step in self.micro_steps:
            if micro_step.targets is None:
                return None
            total += micro_step.targets
        return total

    @property
    def local_size(self) -> int:
        """Samples of this rank's part, fillers aside."""
        return sum(len(micro_step.positions) for micro_step in self.micro_steps)
