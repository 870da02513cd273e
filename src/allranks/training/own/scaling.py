"""float16 in a loop of one's own: the scale of a Task's run, for losses whose number of targets is told with them.

A Task's loss is divided by the step's number of targets before it is scaled and goes backward, so that float16 has to
hold gradients of a mean. A loop hands over sums, one after the other. So at a step's first one the ranks add up its
targets, and take each micro-batch to have as many: every loss is divided by that, and what it was wrong by is made good
together with the division by the scale. With one micro-batch a step, and under a pipeline, nothing is wrong.
"""

from typing import final

import torch

from allranks.parallel.spread import Spread
from allranks.stepping.agreement import Agreement
from allranks.stepping.scaler import Scaler
from allranks.training.own.ground import Ground


@final
class OwnScaling:
    """What a world's step does about it.

    Attributes:
        scaler: the scale, and which steps are skipped.
    """

    def __init__(self, scaler: Scaler, agreement: Agreement) -> None:
        self.scaler = scaler
        self._agreement = agreement
        self._expected: torch.Tensor | None = None

    def multiplier(self, targets: int, micro_steps: int) -> torch.Tensor:
        """By what a loss is multiplied before its backward, float32, 0-dim; collective at the first one of a step.

        Args:
            targets: of this rank's first micro-batch; `micro_steps`: in the step, each taken to have as many.
        """
        if self._expected is None:
            self._expected = (self._agreement.count(targets) * micro_steps).clamp(min=1.0)
        return (self.scaler.scale / self._expected).float()

    def divide(self, spread: Spread, targets: torch.Tensor) -> torch.Tensor:
        """By what the reduced gradients, means over the ranks, are to be multiplied, where the step has `targets`."""
        assert self._expected is not None, "no loss went backward in this step"
        missed = (self._expected / targets.clamp(min=1.0)).float()
        return spread.mesh.layout.sample_ranks / self.scaler.scale * missed

    def forget(self) -> None:
        """The step is over, or is not made."""
        self._expected = None


def make_scaling(ground: Ground, agreement: Agreement) -> OwnScaling | None:
    """That of a world; None where its precision scales nothing."""
    if not ground.precision.scales:
        return None
    return OwnScaling(Scaler(ground.device, ground.processes.world_group), agreement)
